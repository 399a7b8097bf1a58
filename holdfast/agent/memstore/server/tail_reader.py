"""Read along in a snapshot that a worker writes, and tell when it is given up or becomes whole."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from holdfast.agent.memstore.server.replica_store import order_of
from holdfast.memstore import shared_memory
from holdfast.memstore.shared_memory import PAGE, Label, UnusableSnapshot
from holdfast.memstore.store_folders import own_files

SOON: Final = 0.01
"""Seconds until the worker has surely let go of what it has just sealed."""
ANYWAY: Final = 5.0


class TailReader:
    """One snapshot in a file of a worker's: the file may take another one any time."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise `UnusableSnapshot` when it holds neither a draft nor a snapshot, ``OSError`` when it cannot be read."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.whole = False
        """It is sealed, and is not written anew as long as this is open."""
        self.patience = ANYWAY
        try:
            self.label, self.sealed, self.there = _first_page(self._file)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def look(self) -> int | None:
        """Return how many bytes of data are there; None when this snapshot is none any more. A sealed one is held from now on."""
        if not self.whole and not self._renew():
            return None
        if self.sealed and not self.whole:
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # its worker lets go of it in a moment, or has begun the next one there
                self.patience = SOON
            else:
                if not self._renew():  # the lock came too late
                    return None
                self.whole = self.sealed
        return min(self.there, self.label.size)

    def _renew(self) -> bool:
        """Look at the first page; tell whether the snapshot is still there."""
        try:
            label, self.sealed, self.there = _first_page(self._file)
        except UnusableSnapshot:
            return False
        same = _begun_as(label) == _begun_as(self.label)
        self.label = label if same else self.label
        return same

    def send(self, sock: socket.socket, begin: int, size: int) -> int:
        """Send *size* bytes of data from *begin*; return how many there were."""
        with open(self._file, "rb", buffering=0, closefd=False) as file:
            return sock.sendfile(file, PAGE + begin, size)

    def tail(self) -> bytes:
        """Return the tail of a snapshot that is whole; raise `UnusableSnapshot` when it was damaged."""
        tail = os.pread(self._file, self.label.tail, PAGE + self.label.size)
        if len(tail) != self.label.tail:
            raise UnusableSnapshot("it is cut off")
        return tail


def newest(place: Path, rank: int, after: tuple[int, int, float] | None) -> TailReader | None:
    """Return the snapshot of *rank* to push next, among those newer than *after*: the newest whole one, else the newest draft.

    Whole ones first: when the home is slow, each that is begun shall also be finished.
    """
    found: list[TailReader] = []
    for path in own_files(place, rank):
        with suppress(OSError, UnusableSnapshot):
            found.append(TailReader(path))
    wanted = [one for one in found if after is None or order_of(one.label) > after]
    best = max(wanted, key=lambda one: (one.sealed, order_of(one.label)), default=None)
    for one in found:
        if one is not best:
            one.close()
    return best


def _begun_as(label: Label) -> Label:
    """Return *label* as it was when the snapshot was begun."""
    return replace(label, tail=0, digest="")


def _first_page(file: int) -> tuple[Label, bool, int]:
    """Return label, whether it is sealed, and how many bytes are there; raise `UnusableSnapshot` when there is no snapshot.

    The page is read twice: a read that the worker's next snapshot fell into has the old progress beside the new label.
    """
    before, page = os.pread(file, PAGE, 0), os.pread(file, PAGE, 0)
    if before[:8] != page[:8] or before[16:] != page[16:]:
        before, page = page, os.pread(file, PAGE, 0)
        if before[:8] != page[:8] or before[16:] != page[16:]:
            raise UnusableSnapshot("it is being changed")
    label = shared_memory.read_label(page, draft=True)
    sealed = shared_memory.is_sealed(page)
    return label, sealed, label.size if sealed else shared_memory.progress_of(page)
