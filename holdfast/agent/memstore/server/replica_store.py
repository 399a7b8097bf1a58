"""Where replicas of other nodes' snapshots lie in a memory store, which of them stay, and how much memory all may take."""

from __future__ import annotations

import errno
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.memstore import shared_memory
from holdfast.memstore.shared_memory import PAGE, SUFFIX, Label, Slot, UnusableSnapshot
from holdfast.memstore.store_folders import Stream, is_name, replica_name, stream_of

SLOTS: Final = 3
"""Files that each rank's replicas use in turn: two whole ones stay while the third is written."""


class Rejected(Exception):
    """A replica that is not taken: *why*, and whether memory is *full* or we *have* it already."""

    def __init__(self, why: str, *, full: bool = False, have: bool = False) -> None:
        super().__init__(why)
        self.why, self.full, self.have = why, full, have


def order_of(label: Label) -> tuple[int, int, float]:
    """Return what tells a newer snapshot of a rank from an older one."""
    return label.lineage, label.step, label.time


class ReplicaStore:
    """The replicas in one memory store."""

    def __init__(self, place: Path, limit: int) -> None:
        self.place, self.limit = place, limit
        self._lock = threading.Lock()
        self._slots: dict[Path, Slot] = {}
        """Kept open: its memory is mapped already when the next snapshot of the same size comes."""
        self._taken: dict[Path, int] = {}
        """Files in which a replica comes in, and the bytes that it has announced: its tail is not there before its end."""
        self._current: dict[tuple[str, int], int] = {}
        """Source and rank of the replicas that come in now, and over how many connections."""

    # -- taking -------------------------------------------------------------------------------------------------------

    def open(self, source: str, rank: int, label: Label) -> Slot:
        """Return a slot in which the replica has begun; raise `Rejected` when it is not taken, ``OSError`` when memory cannot be had."""
        with self._lock:
            paths = [self.place / replica_name(source, rank, number) for number in range(SLOTS)]
            whole = {path: found for path in paths if (found := _label(path)) is not None}
            if label.digest and any((found.moment, found.digest) == (label.moment, label.digest) for found in whole.values()):
                raise Rejected("it is here already", have=True)
            kept = sorted(whole, key=lambda path: order_of(whole[path]))[-(SLOTS - 1) :]
            free = [path for path in paths if path not in kept and path not in self._taken]
            if not free:
                raise Rejected("another replica of this rank is being taken")
            self._check_room(free[0], label)
            slot = self._slot(free[0])
            slot.begin(label)
            self._taken[slot.path] = label.file_size
            return slot

    def _slot(self, path: Path) -> Slot:
        if not path.exists() and path in self._slots:  # wiped under us
            self._slots.pop(path).close()
        if path not in self._slots:
            self._slots[path] = Slot(path)
        return self._slots[path]

    def _check_room(self, path: Path, label: Label) -> None:
        """Decline what does not fit beside what this node's own ranks take, now or once each has all its slots."""
        own: dict[int, int] = {}
        copies = 0
        for other in self.place.glob(f"*{SUFFIX}"):
            size = _size(other)
            stream = stream_of(other.name)
            if stream is not None and not stream.source:
                own[stream.rank] = max(own.get(stream.rank, 0), size)
            elif other != path:
                copies += max(size, self._taken.get(other, 0))
        need = label.file_size
        if SLOTS * sum(own.values()) + copies + need > self.limit:
            raise Rejected(
                f"{need} bytes for rank {label.rank} do not fit: of {self.limit} bytes this node's own ranks need "
                f"{SLOTS * sum(own.values())}, other replicas take {copies}",
                full=True,
            )

    def check(self, slot: Slot, label: Label) -> None:
        """Decline to make a replica whole that does not fit (any more): this node's own ranks may have begun since it came in."""
        with self._lock:
            self._check_room(slot.path, label)

    def close(self, slot: Slot, *, sealed: bool) -> None:
        """Let go of a slot; one that was not *sealed* holds nothing any more."""
        with self._lock:
            self._taken.pop(slot.path, None)
            if not sealed:
                slot.discard()

    # -- looking ------------------------------------------------------------------------------------------------------

    def labels(self) -> dict[str, Label]:
        """Return the labels of all sealed snapshots, by the name of their file."""
        return {path.name: label for path, label in shared_memory.labels(self.place).items()}

    def path_of(self, name: str) -> Path:
        """Return the file called *name*; raise `Rejected` for what is no name of a snapshot."""
        if not is_name(name):
            raise Rejected(f"no snapshot is called '{name[:80]}'")
        return self.place / name

    # -- tidying ------------------------------------------------------------------------------------------------------

    def enter(self, source: str, rank: int) -> None:
        """Note that replicas of a rank come in."""
        with self._lock:
            self._current[source, rank] = self._current.get((source, rank), 0) + 1

    def leave(self, source: str, rank: int) -> None:
        """Note that a connection on which replicas of a rank came in has ended."""
        with self._lock:
            self._current[source, rank] -= 1
            if not self._current[source, rank]:
                del self._current[source, rank]

    def tidy(self, own: frozenset[int] | None) -> list[str]:
        """Remove what is of no use any more; return its names. *own* are the ranks of this node, None when that is not known yet.

        That is a rank that is not ours, or whose replicas do not come in, once two newer steps are whole of one that is: whatever
        could go together with it is gone. What a lost node left here stays until then: nothing gets newer before it was used.
        """
        with self._lock:
            streams: dict[Stream, dict[Path, Label]] = {}
            for path, label in shared_memory.labels(self.place).items():
                stream = stream_of(path.name)
                if stream is not None:
                    streams.setdefault(stream, {})[path] = label
            active = [stream for stream in streams if (stream in self._current if stream.source else own is None or stream.rank in own)]
            seconds = [sorted(order_of(label)[:2] for label in streams[stream].values())[-2:] for stream in active]
            line = max((two[0] for two in seconds if len(two) > 1), default=None)
            gone = [
                path
                for stream, files in streams.items()
                if line is not None and stream not in active and max(order_of(label)[:2] for label in files.values()) < line
                for path in self._files(stream)
            ]
            for path in gone:
                if path in self._slots:
                    self._slots.pop(path).close()
                with suppress(OSError):
                    path.unlink()
            return sorted(path.name for path in gone)

    def _files(self, stream: Stream) -> list[Path]:
        return [path for path in self.place.glob(f"*{SUFFIX}") if stream_of(path.name) == stream and path not in self._taken]


def _label(path: Path) -> Label | None:
    with suppress(OSError, UnusableSnapshot), path.open("rb") as file:
        return shared_memory.read_label(file.read(PAGE))
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return 0
