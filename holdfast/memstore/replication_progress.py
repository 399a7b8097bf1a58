"""How far the replicas of a rank's snapshots are: a few bytes in the memory store, left by who sends them, read by the rank at every step.

A rank that overwrote its snapshots faster than they reach another node would have no step in common with the replicas of a node that is
lost. Standard library only, as `holdfast.memstore.shared_memory`.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_FORM: Final = struct.Struct("<QQd")
"""Step and lineage of the newest whole replica (0 before the first), and when something was last sent, by the monotonic clock."""
BREATH: Final = 0.2
"""Seconds between two signs of life."""
STILL: Final = 5.0
"""Seconds without one after which replicas do not come in at all: then nobody waits for them."""


class ReplicationProgress:
    """The side of who sends a rank's snapshots."""

    def __init__(self, memstore: Path, rank: int) -> None:
        self._path = _path(memstore, rank)
        self._moment = (0, 0)
        self._next = 0.0

    def begin(self) -> None:
        """Begin anew: what the other node has is not known."""
        self._moment = (0, 0)
        self.end()

    def whole(self, step: int, lineage: int) -> None:
        """Note that the snapshot of that moment is whole on the other node."""
        self._moment = step, lineage
        self._write()

    def moves(self) -> None:
        """Note that something was sent, be anything whole there or not yet."""
        if time.monotonic() >= self._next:
            self._write()

    def _write(self) -> None:
        now = time.monotonic()
        self._next = now + BREATH
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(file, _FORM.pack(*self._moment, now), 0)
            finally:
                os.close(file)

    def end(self) -> None:
        """Leave nothing: what was sent is no replica any more, or nobody sends."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def replicated(memstore: Path, rank: int) -> tuple[int, int] | None:
    """Return step and lineage of the newest snapshot of *rank* that is whole on another node (0, 0 before the first).

    Nothing where none is on its way: nobody sends, or nothing was sent for a while.
    """
    try:
        file = os.open(_path(memstore, rank), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        told = os.pread(file, _FORM.size, 0)
    finally:
        os.close(file)
    if len(told) < _FORM.size:
        return None
    step, lineage, at = _FORM.unpack(told)
    return (step, lineage) if time.monotonic() - at < STILL else None


def _path(memstore: Path, rank: int) -> Path:
    return memstore / f"rank-{rank:05d}.replicated"
