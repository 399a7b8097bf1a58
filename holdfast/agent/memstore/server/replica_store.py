"""The replicas of other nodes' snapshots in a memory store: which of them stay, and how much memory all may take."""

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
"""Files that each rank's replicas use in turn: two complete ones stay while the third is written."""


class Rejected(Exception):
    """A replica that is not accepted: *why*, and whether memory is *full*, or the store has it already (*have*)."""

    def __init__(self, why: str, *, full: bool = False, have: bool = False) -> None:
        super().__init__(why)
        self.why, self.full, self.have = why, full, have


def order_of(label: Label) -> tuple[int, int, float]:
    """Return a sort key by which newer snapshots of a rank come later."""
    return label.lineage, label.step, label.time


class ReplicaStore:
    """The replicas in one memory store."""

    def __init__(self, place: Path, limit: int) -> None:
        self.place, self.limit = place, limit
        self._lock = threading.Lock()
        self._slots: dict[Path, Slot] = {}
        """Kept open: its memory is mapped already when the next snapshot of the same size comes."""
        self._receiving: dict[Path, int] = {}
        """Files that a replica is being written to, and its announced bytes: its tail is only there at the end."""
        self._current: dict[tuple[str, int], int] = {}
        """Source and rank of the replicas that are being received, and over how many connections."""

    # -- receiving ----------------------------------------------------------------------------------------------------

    def open(self, source: str, rank: int, label: Label) -> Slot:
        """Return a slot in which the replica has begun; raise `Rejected` when it is not accepted, ``OSError`` without memory."""
        with self._lock:
            paths = [self.place / replica_name(source, rank, number) for number in range(SLOTS)]
            complete: dict[Path, Label] = {}
            for path in paths:
                with suppress(OSError, UnusableSnapshot), path.open("rb") as file:
                    if (found := shared_memory.read_label(file.read(PAGE))) is not None:
                        complete[path] = found
            if label.digest and any((found.moment, found.digest) == (label.moment, label.digest) for found in complete.values()):
                raise Rejected("it is here already", have=True)
            kept = sorted(complete, key=lambda path: order_of(complete[path]))[-(SLOTS - 1) :]
            free = [path for path in paths if path not in kept and path not in self._receiving]
            if not free:
                raise Rejected("another replica of this rank is being received")
            path = free[0]
            self._check_room(path, label)
            if not path.exists() and path in self._slots:  # wiped meanwhile
                self._slots.pop(path).close()
            if path not in self._slots:
                self._slots[path] = Slot(path)
            slot = self._slots[path]
            slot.begin(label)
            self._receiving[slot.path] = label.file_size
            return slot

    def _check_room(self, path: Path, label: Label) -> None:
        """Reject what does not fit in addition to the snapshots of this node's own ranks, now or once each has all its slots."""
        own: dict[int, int] = {}
        copies = 0
        for other in self.place.glob(f"*{SUFFIX}"):
            size = _size(other)
            stream = stream_of(other.name)
            if stream is not None and not stream.source:
                own[stream.rank] = max(own.get(stream.rank, 0), size)
            elif other != path:
                copies += max(size, self._receiving.get(other, 0))
        needed = label.file_size
        if SLOTS * sum(own.values()) + copies + needed > self.limit:
            raise Rejected(
                f"{needed} bytes for rank {label.rank} do not fit: of {self.limit} bytes this node's own ranks need "
                f"{SLOTS * sum(own.values())}, other replicas take {copies}",
                full=True,
            )

    def check(self, slot: Slot, label: Label) -> None:
        """Reject a complete replica that does not fit any more: this node's own ranks may have begun since it was accepted."""
        with self._lock:
            self._check_room(slot.path, label)

    def close(self, slot: Slot, *, sealed: bool) -> None:
        """Release a slot; one that was not *sealed* becomes empty."""
        with self._lock:
            self._receiving.pop(slot.path, None)
            if not sealed:
                slot.discard()

    # -- reading ------------------------------------------------------------------------------------------------------

    def labels(self) -> dict[str, Label]:
        """Return the labels of all sealed snapshots, by the name of their file."""
        return {path.name: label for path, label in shared_memory.labels(self.place).items()}

    def path_of(self, name: str) -> Path:
        """Return the file called *name*; raise `Rejected` for an invalid name."""
        if not is_name(name):
            raise Rejected(f"no snapshot is called '{name[:80]}'")
        return self.place / name

    # -- cleaning up --------------------------------------------------------------------------------------------------

    def enter(self, source: str, rank: int) -> None:
        """Note a connection on which replicas of a rank are received."""
        with self._lock:
            self._current[source, rank] = self._current.get((source, rank), 0) + 1

    def leave(self, source: str, rank: int) -> None:
        """Note that such a connection has ended."""
        with self._lock:
            self._current[source, rank] -= 1
            if not self._current[source, rank]:
                del self._current[source, rank]

    def tidy(self, own: frozenset[int] | None) -> list[str]:
        """Remove useless files; return their names. *own* are the ranks of this node, None while that is unknown.

        A file is useless that belongs to a rank that is not ours, or whose replicas are not received any more, once two newer steps are
        complete of another rank that is: nothing that it could be combined with exists. What a lost node left here stays until then, as
        nothing gets newer before it was used.
        """
        with self._lock:
            streams: dict[Stream, dict[Path, Label]] = {}
            for path, label in shared_memory.labels(self.place).items():
                stream = stream_of(path.name)
                if stream is not None:
                    streams.setdefault(stream, {})[path] = label
            active = [stream for stream in streams if (stream in self._current if stream.source else own is None or stream.rank in own)]
            newest_two = [sorted(order_of(label)[:2] for label in streams[stream].values())[-2:] for stream in active]
            limit = max((two[0] for two in newest_two if len(two) > 1), default=None)
            useless = [
                path
                for stream, files in streams.items()
                if limit is not None and stream not in active and max(order_of(label)[:2] for label in files.values()) < limit
                for path in self.place.glob(f"*{SUFFIX}")
                if stream_of(path.name) == stream and path not in self._receiving
            ]
            for path in useless:
                if path in self._slots:
                    self._slots.pop(path).close()
                with suppress(OSError):
                    path.unlink()
            return sorted(path.name for path in useless)


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return 0
