"""The folders of memory stores, each of one job on one node and accessible to this user alone, and the names of the files in them."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.memstore.shared_memory import SUFFIX

ROOT: Final = Path("/dev/shm")  # noqa: S108 (the kernel's own memory file system; the folder below it is ours alone)


def memstore_of(node: str, job: str) -> Path:
    """Return the folder of the memory store of *job* on *node* (any names)."""
    job_key = key_of(f"{node}\0{job}")
    return root() / f"{key_of(node)}-{job_key}"


def key_of(node: str) -> str:
    """Return the short key that identifies *node* in file names."""
    return hashlib.sha256(node.encode()).hexdigest()[:16]


def memstores_of(node: str) -> list[Path]:
    """Return all memory stores on *node*."""
    with suppress(OSError):
        return sorted(root().glob(f"{key_of(node)}-*"))
    return []


def root() -> Path:
    """Return the folder of this user's memory stores: below ``HOLDFAST_MEMSTORE_ROOT``, or the memory file system.

    Every user may create folders there. When another user has taken the default name, ours gets a name that cannot be guessed; the
    oldest such folder is used, so that all processes find the same one.
    """
    place = Path(os.environ.get("HOLDFAST_MEMSTORE_ROOT") or ROOT)
    usual = place / f"holdfast-{os.getuid()}"
    try:
        taken = usual.lstat().st_uid != os.getuid()
    except OSError:
        taken = False
    if not taken:
        return usual
    if not (found := _alternatives(usual)):
        with suppress(OSError):
            usual.with_name(f"{usual.name}.{time.time_ns():020}-{secrets.token_hex(8)}").mkdir(mode=0o700)
        found = _alternatives(usual)
    return found[0] if found else usual


def _alternatives(usual: Path) -> list[Path]:
    """Return this user's folders with another name than *usual*, the oldest first."""
    found = []
    for one in usual.parent.glob(f"{usual.name}.*"):
        with suppress(OSError):
            if _is_private(one):
                found.append(one)
    return sorted(found)


def make(memstore: Path) -> None:
    """Create the folder *memstore* for this user alone; raise ``OSError`` when that fails, or another user owns it."""
    for folder in (memstore.parent, memstore):
        # A missing /dev/shm is not created: it would be a disk.
        folder.mkdir(parents="HOLDFAST_MEMSTORE_ROOT" in os.environ, exist_ok=True, mode=0o700)
        if not _is_private(folder):
            raise PermissionError(errno.EPERM, f"{folder} is accessible to other users, or belongs to one")


def _is_private(folder: Path) -> bool:
    """Return whether *folder* is a real folder of this user that no other user can enter; a link may lead anywhere."""
    facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077


def wipe(memstore: Path) -> None:
    """Remove *memstore* and free its memory; folders of other users are left alone."""
    with suppress(OSError):
        if not (_is_private(memstore.parent) and _is_private(memstore)):
            return
        for path in memstore.iterdir():
            with suppress(OSError):
                path.unlink()
        memstore.rmdir()


def usage(memstore: Path) -> int:
    """Return the bytes of memory that *memstore* uses."""
    size = 0
    with suppress(OSError):
        for path in memstore.iterdir():
            with suppress(OSError):
                size += path.stat().st_blocks * 512
    return size


# -- names of snapshot files --------------------------------------------------------------------------------------------

_OWN: Final = re.compile(r"rank-(\d{5,})\.\d+\.snap")
_REPLICA: Final = re.compile(r"copy-([0-9a-f]{16})-(\d{5,})\.\d+\.snap")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.\d+)?\.snap")
_SOURCE: Final = re.compile(r"[0-9a-f]{16}")


class Stream(NamedTuple):
    """The rank whose snapshots a file holds, one after the other."""

    source: str
    """The key of the rank's node; empty: this node."""
    rank: int


def own_name(rank: int, number: int) -> str:
    """Return the name of file *number* of one of this node's ranks."""
    return f"rank-{rank:05d}.{number}{SUFFIX}"


def replica_name(source: str, rank: int, number: int) -> str:
    """Return the name of file *number* for replicas of a *rank* of the node with the key *source*."""
    return f"copy-{source}-{rank:05d}.{number}{SUFFIX}"


def own_files(memstore: Path, rank: int) -> Iterator[Path]:
    """Yield the files of one of this node's ranks."""
    return memstore.glob(f"rank-{rank:05d}.*{SUFFIX}")


def is_replica(name: str) -> bool:
    """Return whether the file *name* is a replica from another node."""
    return name.startswith("copy-")


def is_name(name: str) -> bool:
    """Return whether *name* is valid for a snapshot file: it cannot lead out of its folder."""
    return _NAME.fullmatch(name) is not None


def is_source(source: str) -> bool:
    """Return whether *source* is a valid key of a node."""
    return _SOURCE.fullmatch(source) is not None


def stream_of(name: str) -> Stream | None:
    """Return the rank whose snapshots the file *name* holds; None for another file."""
    if found := _OWN.fullmatch(name):
        return Stream("", int(found[1]))
    if found := _REPLICA.fullmatch(name):
        return Stream(found[1], int(found[2]))
    return None
