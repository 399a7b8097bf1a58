"""Notify the server of a memory store that a snapshot has changed: a datagram socket in the store, and who sleeps until one comes."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.protocol import reachable

BELL: Final = "bell"
"""Name of the socket in a memory store on which its server listens."""
ANYWAY: Final = 5.0
"""Seconds after which those who wait look without having been woken: a notification can be lost with the process that was to send it."""


def notify(memstore: Path, sock: socket.socket) -> None:
    """Notify the server of *memstore* through the datagram socket *sock*, without waiting for anything."""
    with suppress(OSError):
        sock.sendto(b"!", socket.MSG_DONTWAIT, str(memstore / BELL))  # when as many wait as can, one more would say nothing new


class SnapshotNotification:
    """Counts notifications."""

    def __init__(self, place: Path) -> None:
        """Listen on the socket in *place*; raise ``OSError`` when that cannot be."""
        self._heard = threading.Condition()
        self._count = 0
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        new = place / f"{BELL}.new"
        new.unlink(missing_ok=True)
        with reachable(new) as address:
            self._bell.bind(address)
        new.chmod(0o600)
        os.replace(new, place / BELL)  # noqa: PTH105 (Path.replace says the same)

    def run(self) -> None:
        """Listen for ever."""
        while True:
            self._bell.recv(64)
            self.wake()

    def wake(self) -> None:
        """Wake everybody who waits."""
        with self._heard:
            self._count += 1
            self._heard.notify_all()

    def count(self) -> int:
        """Return how many notifications have come."""
        with self._heard:
            return self._count

    def wait(self, count: int, seconds: float = ANYWAY) -> None:
        """Sleep until more than *count* have come, or *seconds* have passed."""
        with self._heard:
            self._heard.wait_for(lambda: self._count > count, seconds)
