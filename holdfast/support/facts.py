"""Facts about this installation and this machine; each may fail without the others."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from holdfast import __version__, paths
from holdfast.history.schema import HEAD
from holdfast.memstore import shared_memory, store_folders
from holdfast.protocol import PROTOCOL
from holdfast.security.redaction import shown

PACKAGES: Final = (
    "torch", "numpy", "prefect", "fastapi", "sqlalchemy", "sqlmodel", "alembic", "psycopg", "pydantic", "click", "paramiko", "hyperscan",
    "nvidia-ml-py", "matplotlib", "rich", "pyyaml",
)  # fmt: skip
SHOWN: Final = (
    "HOLDFAST_",
    "PREFECT_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "CUDA_",
    "OMP_",
    "MKL_",
    "UCX_",
    "FI_",
    "SLURM_",
    "PYTHON",
    "LANG",
    "LC_",
)
"""Prefixes of the names of variables with useful values, which are no secrets by their names."""
DATABASES: Final = ("HOLDFAST_HISTORY", "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
"""Variables with the address of a database, whose password must be hidden even in an unusual form."""
HEALTH_SECONDS: Final = 30.0
MOST_PROCESSES: Final = 500


def versions() -> dict[str, Any]:
    """Return the versions of everything involved."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {
        "holdfast": __version__,
        "protocol": PROTOCOL,
        "snapshots": shared_memory.FORMAT,
        "history": HEAD,
        "python": sys.version,
        "executable": sys.executable,
        "packages": found,
        "system": platform.platform(),
    }


def machine() -> dict[str, Any]:
    """Return the resources of this machine and their use."""
    folders = {"home": paths.home(), "memory": store_folders.root().parent, "tmp": Path(os.environ.get("TMPDIR") or "/tmp")}  # noqa: S108 (only its free space is read)
    return {
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": _memory(),
        "disks": {name: _disk(folder) for name, folder in folders.items()},
        "limits": {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("NOFILE", "NPROC", "MEMLOCK", "CORE", "AS")},
        "user": os.getuid(),
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }


def _memory() -> dict[str, str]:
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        wanted = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Shmem")
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines) if name in wanted}
    return {}


def _disk(folder: Path) -> dict[str, Any]:
    existing = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    total, used, free = shutil.disk_usage(existing)
    return {"path": str(folder), "total": total, "used": used, "free": free}


def health() -> Any:  # noqa: ANN401 (any JSON)
    """Return the output of `holdfast node check --local`, run in its own process because a hanging driver may block it."""
    command = [sys.executable, "-m", "holdfast", "node", "check", "--local", "--json", "--timeout", "5s"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HEALTH_SECONDS, check=False, stdin=subprocess.DEVNULL)
    return json.loads(done.stdout)


def processes() -> list[dict[str, Any]]:
    """Return the processes of Holdfast and Prefect on this machine."""
    found: list[dict[str, Any]] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and len(found) < MOST_PROCESSES:
            with suppress(OSError):
                arguments = folder.joinpath("cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
                if any("holdfast" in word or "prefect" in word or "flows." in word for word in arguments):
                    state = folder.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()
                    found.append({"pid": int(folder.name), "parent": int(state[1]), "state": state[0], "command": arguments})
    return sorted(found, key=lambda one: int(one["pid"]))


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the useful variables of *environment*."""
    return {name: shown(value) if name in DATABASES else value for name, value in environment.items() if name.startswith(SHOWN)}
