"""The names of snapshots' files in a memory store: a rank's own, and the replicas of other nodes' ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.memstore.shared_memory import SUFFIX

_OWN: Final = re.compile(r"rank-(\d{5,})\.\d+\.snap")
_REPLICA: Final = re.compile(r"copy-([0-9a-f]{16})-(\d{5,})\.\d+\.snap")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.\d+)?\.snap")
_SOURCE: Final = re.compile(r"[0-9a-f]{16}")


class Stream(NamedTuple):
    """Whose snapshots a file takes, one after the other."""

    source: str
    """The key of the node whose rank it is; empty: this node."""
    rank: int


def own_name(rank: int, number: int) -> str:
    """Return the name of the file of that *number* of one of this node's ranks."""
    return f"rank-{rank:05d}.{number}{SUFFIX}"


def replica_name(source: str, rank: int, number: int) -> str:
    """Return the name of the file of that *number* for the replicas of a *rank* of the node with the key *source*."""
    return f"copy-{source}-{rank:05d}.{number}{SUFFIX}"


def own_files(memstore: Path, rank: int) -> Iterator[Path]:
    """Yield the files of one of this node's ranks."""
    return memstore.glob(f"rank-{rank:05d}.*{SUFFIX}")


def is_replica(name: str) -> bool:
    """Tell whether the file called *name* is another node's copy."""
    return name.startswith("copy-")


def is_name(name: str) -> bool:
    """Tell whether a snapshot's file may be called *name*: it leads out of no folder."""
    return _NAME.fullmatch(name) is not None


def is_source(source: str) -> bool:
    """Tell whether a node may have the key *source*."""
    return _SOURCE.fullmatch(source) is not None


def stream_of(name: str) -> Stream | None:
    """Return whose snapshots the file called *name* takes."""
    if found := _OWN.fullmatch(name):
        return Stream("", int(found[1]))
    if found := _REPLICA.fullmatch(name):
        return Stream(found[1], int(found[2]))
    return None
