"""What a job was submitted with: versions, command and git commit. It is recorded once, so that a report describes itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import holdfast
from holdfast.spec import TrainingJob

_SECONDS: Final = 5.0
"""For git, whose folder may be on a dead file server."""
_BUILT: Final = re.compile(r"^(cuda|hip)\s*(?::[^=]*)?=\s*'([^']+)'", re.MULTILINE)
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_MODULE: Final = re.compile(r"Kernel Module\S*\s+(?:for \S+\s+)?(\d[\d.]+)")


def provenance(spec: TrainingJob) -> dict[str, str]:
    """Return the versions on this host, and the git commit of the script; what cannot be found out is missing."""
    found = {"holdfast": holdfast.__version__, "python": platform.python_version()}
    names = ["prefect"] if spec.python is not None and spec.python != sys.executable else ["prefect", "torch"]
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "torch" in found:
        found |= _built_for()
    with suppress(OSError):
        module = _MODULE.search(_DRIVER.read_text("utf-8", "replace"))
        found |= {"driver": module[1]} if module is not None else {}
    commit = _git_commit(spec)
    return found | ({"git_commit": commit} if commit else {})


def _built_for() -> dict[str, str]:
    """Return the CUDA or ROCm version that torch is built for, without importing it."""
    with suppress(ImportError, ValueError, OSError):
        torch = importlib.util.find_spec("torch")
        if torch is not None and torch.origin is not None:
            return dict(_BUILT.findall(Path(torch.origin).with_name("version.py").read_text("utf-8")))
    return {}


def _git_commit(spec: TrainingJob) -> str:
    """Return the commit of the folder of the script, marked if tracked files differ from it; empty outside a git repository."""
    folder = spec.inside(spec.script).parent if spec.script else spec.inside(".")
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=True)
        return done.stdout.decode("utf-8", "replace").strip()
    return ""
