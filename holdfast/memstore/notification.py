"""Signals between the ranks of a node and its memory server: a snapshot has changed; how far its replicas are.

A rank notifies the server through a datagram socket in the memory store. The server leaves the progress of replication in a small file
that the rank reads at every step: a rank that overwrote its snapshots faster than they are replicated would have no step in common
with the replicas of a lost node. Standard library only.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.protocol import socket_address

SOCKET: Final = "notify"
"""Name of the server's socket in a memory store."""
CHECK_SECONDS: Final = 5.0
"""Seconds after which a waiting thread checks without a notification: one may be lost with the process that was to send it."""


def notify_socket() -> socket.socket:
    """Return a socket for `notify`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.setblocking(False)  # noqa: FBT003 (its only argument)
    return sock


def notify(memstore: Path, sock: socket.socket) -> None:
    """Notify the server of *memstore* through the datagram socket *sock*, without waiting."""
    with suppress(OSError):  # a full queue already says that there is something new
        sock.sendto(b"!", socket.MSG_DONTWAIT, str(memstore / SOCKET))


class SnapshotNotification:
    """Counts notifications."""

    def __init__(self, place: Path) -> None:
        """Listen on the socket in *place*; raise ``OSError`` when that fails."""
        self._changed = threading.Condition()
        self._count = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        new = place / f"{SOCKET}.new"
        new.unlink(missing_ok=True)
        with socket_address(new) as address:
            self._socket.bind(address)
        new.chmod(0o600)
        os.replace(new, place / SOCKET)  # noqa: PTH105 (Path.replace says the same)

    def run(self) -> None:
        """Receive notifications forever."""
        while True:
            self._socket.recv(64)
            self.wake()

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def count(self) -> int:
        """Return how many notifications have arrived."""
        with self._changed:
            return self._count

    def wait(self, count: int, seconds: float = CHECK_SECONDS) -> None:
        """Sleep until more than *count* notifications have arrived, or for *seconds*."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > count, seconds)


_PROGRESS: Final = struct.Struct("<QQd")
"""Step and lineage of the newest complete replica (0 before the first), and when bytes were last sent (monotonic clock)."""
ALIVE_SECONDS: Final = 0.2
"""Seconds between two updates while bytes are sent."""
STALE_SECONDS: Final = 5.0
"""Seconds without an update after which replication counts as stopped, and no rank waits for it."""


class ReplicationProgress:
    """Records how far the replicas of one rank's snapshots are; used by the sender."""

    def __init__(self, memstore: Path, rank: int) -> None:
        self._path = _progress_file(memstore, rank)
        self._moment = (0, 0)
        self._next = 0.0

    def begin(self) -> None:
        """Start again: what the other node has is unknown."""
        self._moment = (0, 0)
        self.end()

    def complete(self, step: int, lineage: int) -> None:
        """Record that the other node has the complete snapshot of this step and lineage."""
        self._moment = step, lineage
        self._write()

    def sent(self) -> None:
        """Record that bytes were sent."""
        if time.monotonic() >= self._next:
            self._write()

    def _write(self) -> None:
        now = time.monotonic()
        self._next = now + ALIVE_SECONDS
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(file, _PROGRESS.pack(*self._moment, now), 0)
            finally:
                os.close(file)

    def end(self) -> None:
        """Remove the record: there is no replica any more, or nothing is sent."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def replicated(memstore: Path, rank: int) -> tuple[int, int] | None:
    """Return step and lineage of the newest snapshot of *rank* that is complete on another node (0, 0 before the first).

    None when replication is not running: nothing was sent for `STALE_SECONDS`.
    """
    try:
        record = _progress_file(memstore, rank).read_bytes()
    except OSError:
        return None
    if len(record) < _PROGRESS.size:
        return None
    step, lineage, at = _PROGRESS.unpack_from(record)
    return (step, lineage) if time.monotonic() - at < STALE_SECONDS else None


def _progress_file(memstore: Path, rank: int) -> Path:
    return memstore / f"rank-{rank:05d}.replicated"
