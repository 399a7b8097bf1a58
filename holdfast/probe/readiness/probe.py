"""What runs on a node to see whether it is ready: it looks, and judges nothing."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast.probe.readers.collect import gathered
from holdfast.probe.readers.gpus import read_gpus

MARK: Final = ".holdfast-check-"
"""What begins the names of folders that are made to see whether they can be, and removed at once."""
TORCH_SECONDS: Final = 90.0
TORCH: Final = """
import json, warnings, torch
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
built = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gloo": gloo}
why = str(said[-1].message).strip().splitlines()[0] if said and not devices else ""
print(json.dumps({**built, "devices": devices, "why": why, "path": torch.__file__}))
"""
"""What the job's interpreter runs: what its torch is built for, and how many GPUs it can use, which an old driver makes none."""
LIMITS: Final = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
MEMORY: Final = "/dev/shm"  # noqa: S108 (the file system in memory itself)

ApprovalRequest = Mapping[str, Any]


def answer(asked: ApprovalRequest) -> Any:  # noqa: ANN401 (any JSON)
    """Answer one question, in a child where that may hang: on a driver, or on the server of a file system."""
    verb = asked["do"]
    if verb == "time":
        return {"time": time.time()}
    late = f"it did not answer within {asked['seconds']:g} s"
    (told,) = gathered({verb: lambda: VERBS[verb](asked)}, time.monotonic() + asked["seconds"], late).values()
    return told


def _facts(asked: ApprovalRequest) -> dict[str, Any]:
    directory = _there(Path(asked["directory"]).expanduser().absolute())
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk": {"path": str(directory), "free": shutil.disk_usage(directory).free, "writable": os.access(directory, os.W_OK)},
        "shm": _memory(),
        "limits": {name: list(resource.getrlimit(which)) for name, which in LIMITS.items()},
        "infiniband": _entries("/sys/class/infiniband"),
    }


def _there(path: Path) -> Path:
    """Return the nearest folder on the way to *path* that is there."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _memory() -> dict[str, int] | None:
    if not os.path.ismount(MEMORY):
        return None
    used = shutil.disk_usage(MEMORY)
    return {"free": used.free, "total": used.total}


def _entries(folder: str) -> list[str]:
    with suppress(OSError):
        return sorted(path.name for path in Path(folder).iterdir())
    return []


def _torch(asked: ApprovalRequest) -> dict[str, Any]:
    """Ask the job's interpreter for its torch: importing it is the proof that it can be."""
    words = [str(Path(asked["python"]).expanduser()), "-c", TORCH]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=TORCH_SECONDS, check=False, cwd="/")
    except subprocess.TimeoutExpired:
        return {"failed": f"importing it and counting its GPUs took more than {TORCH_SECONDS:g} s"}
    with suppress(ValueError, IndexError):
        return dict(json.loads(done.stdout.decode().strip().splitlines()[-1]))
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return {"failed": said[-1] if said else f"it ended with status {done.returncode}"}


def _paths(asked: ApprovalRequest) -> dict[str, Any]:
    """Tell which paths are there."""
    return {path: os.access(path, os.R_OK) for path in asked["paths"]}


def _leave(asked: ApprovalRequest) -> dict[str, Any]:
    """Make a folder in a folder, or in the nearest one above that is there, as a save does, and a file in it; say where."""
    folder = _there(Path(asked["folder"]))
    place = folder / f"{MARK}{asked['token']}"
    try:
        place.mkdir()
        _write(place / asked["name"], asked["token"])
    except OSError as error:
        return {"blind": f"nothing can be written in {folder}: {error.strerror}"}
    return {"place": str(place)}


def _write(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _join(asked: ApprovalRequest) -> dict[str, Any]:
    """Look for the file of another node's, and write one beside it as each rank of a save does; tell what came of both."""
    place = Path(asked["place"])
    try:
        if not _sees(place / asked["by"], asked["token"], asked["patience"]):
            return {"seen": False}
    except PermissionError as error:
        return {"seen": True, "unread": error.strerror}
    own = place / asked["name"]
    try:
        _write(own, asked["token"])
        own.unlink()
    except OSError as error:
        return {"seen": True, "unwritten": error.strerror}
    return {"seen": True}


def _sees(file: Path, text: str, patience: float) -> bool:
    """Tell whether a file is there, and holds what it should: within a second or so, as network file systems remember.

    Raise ``PermissionError`` where it is there and may not be read.
    """
    deadline = time.monotonic() + patience
    while True:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(file.parent)  # noqa: PTH208 (what a network file system remembers of the folder is asked for anew)
            return file.read_text() == text
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _remove(asked: ApprovalRequest) -> dict[str, Any]:
    place = Path(asked["place"])
    if place.name.startswith(MARK):
        shutil.rmtree(place)
    return {}


VERBS: Final[Mapping[str, Callable[[ApprovalRequest], Any]]] = {
    "facts": _facts,
    "gpus": lambda _asked: read_gpus(),
    "torch": _torch,
    "paths": _paths,
    "leave": _leave,
    "join": _join,
    "remove": _remove,
}
