"""The folders of memory stores: where they are on a node, and whose. Each belongs to one job on one node, and to this user alone."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

ROOT: Final = Path("/dev/shm")  # noqa: S108 (the kernel's own memory file system; the folder below it is ours alone)


def memstore_of(node: str, job: str) -> Path:
    """Return the folder in memory that is the memory store of *job* on *node* (any names)."""
    name = hashlib.sha256(f"{node}\0{job}".encode()).hexdigest()[:16]
    return root() / f"{key_of(node)}-{name}"


def key_of(node: str) -> str:
    """Return the short name that stands for *node* in names of files."""
    return hashlib.sha256(node.encode()).hexdigest()[:16]


def memstores_of(node: str) -> list[Path]:
    """Return all memory stores that there are on *node*."""
    with suppress(OSError):
        return sorted(root().glob(f"{key_of(node)}-*"))
    return []


def root() -> Path:
    """Return the folder of this user's memory stores: below ``HOLDFAST_MEMSTORE_ROOT``, or the memory file system.

    Anybody may make folders there. Where somebody else has taken the name, this user's folder has one that nobody can guess: the first
    of those that there are, so that all processes find the same.
    """
    place = Path(os.environ.get("HOLDFAST_MEMSTORE_ROOT") or ROOT)
    usual = place / f"holdfast-{os.getuid()}"
    if not _is_anothers(usual):
        return usual
    if not (found := _others_of(usual)):
        with suppress(OSError):
            usual.with_name(f"{usual.name}.{time.time_ns():020}-{secrets.token_hex(8)}").mkdir(mode=0o700)
        found = _others_of(usual)
    return found[0] if found else usual


def _is_anothers(folder: Path) -> bool:
    """Tell whether somebody else has made *folder*, or a link in its place."""
    try:
        return folder.lstat().st_uid != os.getuid()
    except OSError:
        return False


def _others_of(usual: Path) -> list[Path]:
    """Return this user's folders for memory stores that are not called as *usual*, the oldest first."""
    found = []
    for one in usual.parent.glob(f"{usual.name}.*"):
        with suppress(OSError):
            if _is_ours(one):
                found.append(one)
    return sorted(found)


def make(memstore: Path) -> None:
    """Make the folder *memstore* for this user alone; raise ``OSError`` when it cannot be, or belongs to somebody else."""
    for folder in (memstore.parent, memstore):
        folder.mkdir(
            parents="HOLDFAST_MEMSTORE_ROOT" in os.environ, exist_ok=True, mode=0o700
        )  # a missing /dev/shm is not made: it would be a disk
        if not _is_ours(folder):
            raise PermissionError(errno.EPERM, f"{folder} is open to others, or belongs to one")


def _is_ours(folder: Path) -> bool:
    """Tell whether *folder* is one of this user's that nobody else may write in: a link laid out by another leads anywhere."""
    facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077


def wipe(memstore: Path) -> None:
    """Give the memory of *memstore* back; what is not ours is left alone."""
    with suppress(OSError):
        if not (_is_ours(memstore.parent) and _is_ours(memstore)):
            return
        for path in memstore.iterdir():
            with suppress(OSError):
                path.unlink()
        memstore.rmdir()


def usage(memstore: Path) -> int:
    """Return the bytes of memory that *memstore* takes."""
    size = 0
    with suppress(OSError):
        for path in memstore.iterdir():
            with suppress(OSError):
                size += path.stat().st_blocks * 512
    return size
