"""The program that examines whether its node is ready; it judges nothing."""

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

from holdfast.probe.readers.collect import run_in_children
from holdfast.probe.readers.gpus import read_gpus

PREFIX: Final = ".holdfast-check-"
"""The prefix of folders that are made as a test and removed at once."""
TORCH_SECONDS: Final = 90.0
TORCH: Final = """
import json, warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
built = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gloo": gloo}
why = str(caught[-1].message).strip().splitlines()[0] if caught and not devices else ""
print(json.dumps({**built, "devices": devices, "why": why, "path": torch.__file__}))
"""
"""What the job's interpreter runs: what its torch is built for, and how many GPUs it can use (none with an old driver)."""
LIMITS: Final = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
MEMORY: Final = "/dev/shm"  # noqa: S108 (the file system in memory itself)

Question = Mapping[str, Any]


def answer(asked: Question) -> Any:  # noqa: ANN401 (any JSON)
    """Answer one question, in a child because a driver or a file server may hang."""
    name, seconds = asked["do"], asked["seconds"]
    if name == "time":
        return {"time": time.time()}
    late = f"no answer within {seconds:g} s"
    (found,) = run_in_children({name: lambda: QUESTIONS[name](asked)}, time.monotonic() + seconds, late).values()
    return found


def _facts(asked: Question) -> dict[str, Any]:
    directory = _nearest_folder(Path(asked["directory"]).expanduser().absolute())
    infiniband: list[str] = []
    with suppress(OSError):
        infiniband = sorted(path.name for path in Path("/sys/class/infiniband").iterdir())
    memory = shutil.disk_usage(MEMORY) if os.path.ismount(MEMORY) else None
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk": {"path": str(directory), "free": shutil.disk_usage(directory).free, "writable": os.access(directory, os.W_OK)},
        "shm": None if memory is None else {"free": memory.free, "total": memory.total},
        "limits": {name: list(resource.getrlimit(which)) for name, which in LIMITS.items()},
        "infiniband": infiniband,
    }


def _nearest_folder(path: Path) -> Path:
    """Return *path*, or the nearest folder above it that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _torch(asked: Question) -> dict[str, Any]:
    """Import torch with the job's interpreter, which proves that it can be imported."""
    command = [str(Path(asked["python"]).expanduser()), "-c", TORCH]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TORCH_SECONDS, check=False, cwd="/")
    except subprocess.TimeoutExpired:
        return {"failed": f"importing it and counting its GPUs took more than {TORCH_SECONDS:g} s"}
    with suppress(ValueError, IndexError):
        return dict(json.loads(done.stdout.decode().strip().splitlines()[-1]))
    errors = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return {"failed": errors[-1] if errors else f"it exited with status {done.returncode}"}


def _paths(asked: Question) -> dict[str, Any]:
    """Return which paths are readable."""
    return {path: os.access(path, os.R_OK) for path in asked["paths"]}


def _leave(asked: Question) -> dict[str, Any]:
    """Make a folder in *folder*, or in the nearest one above that exists, as a save does, and a file in it; return where."""
    folder = _nearest_folder(Path(asked["folder"]))
    place = folder / f"{PREFIX}{asked['token']}"
    try:
        place.mkdir()
        _write(place / asked["name"], asked["token"])
    except OSError as error:
        return {"blind": f"{folder} is not writable: {error.strerror}"}
    return {"place": str(place)}


def _write(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _join(asked: Question) -> dict[str, Any]:
    """Read another node's file, and write one next to it as each rank of a save does; return the result of both."""
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
    """Return whether a file appears within *patience* seconds, and contains *text*: network file systems cache folders.

    Raise ``PermissionError`` where it exists and may not be read.
    """
    deadline = time.monotonic() + patience
    while True:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(file.parent)  # noqa: PTH208 (makes a network file system refresh its cache of the folder)
            return file.read_text() == text
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _remove(asked: Question) -> dict[str, Any]:
    place = Path(asked["place"])
    if place.name.startswith(PREFIX):
        shutil.rmtree(place)
    return {}


QUESTIONS: Final[Mapping[str, Callable[[Question], Any]]] = {
    "facts": _facts,
    "gpus": lambda _asked: read_gpus(),
    "torch": _torch,
    "paths": _paths,
    "leave": _leave,
    "join": _join,
    "remove": _remove,
}
