"""Facts about this installation and this machine. Each may be missing without the others."""

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
from holdfast.redaction import shown

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
"""Beginnings of the names of variables whose values say something and are no secrets, as far as their names go."""
DATABASES: Final = ("HOLDFAST_HISTORY", "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
"""Variables with the address of a database, which may be written in a way that nobody can read."""
HEALTH_SECONDS: Final = 30.0
MOST_PROCESSES: Final = 500


def versions() -> dict[str, Any]:
    """Return versions of all that works together."""
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
    """Return what this machine has and how busy it is."""
    folders = {"home": paths.home(), "memory": store_folders.root().parent, "tmp": Path(os.environ.get("TMPDIR") or "/tmp")}  # noqa: S108 (only looked at)
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
    place = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    total, used, free = shutil.disk_usage(place)
    return {"path": str(folder), "total": total, "used": used, "free": free}


def health() -> Any:  # noqa: ANN401 (any JSON)
    """Return what `holdfast health --local` says: in a process of its own, as a driver that hangs takes it along."""
    command = [sys.executable, "-m", "holdfast", "health", "--local", "--json", "--deadline", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HEALTH_SECONDS, check=False, stdin=subprocess.DEVNULL)
    return json.loads(done.stdout)


def processes() -> list[dict[str, Any]]:
    """Return the processes on this machine that are Holdfast's, or were started by it."""
    found: list[dict[str, Any]] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and len(found) < MOST_PROCESSES:
            with suppress(OSError):
                words = folder.joinpath("cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
                if any("holdfast" in word or "prefect" in word or "flows." in word for word in words):
                    state = folder.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()
                    found.append({"pid": int(folder.name), "parent": int(state[1]), "state": state[0], "command": words})
    return sorted(found, key=lambda one: int(one["pid"]))


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say something."""
    return {name: shown(value) if name in DATABASES else value for name, value in environment.items() if name.startswith(SHOWN)}
