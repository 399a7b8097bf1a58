"""The bell of a vault: whoever waits for news of snapshots sleeps until it rings."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Final

from holdfast.memstore.shared_memory import BELL
from holdfast.protocol import reachable

ANYWAY: Final = 5.0
"""Seconds after which those who wait look without having been woken: a ring can be lost with the process that was to give it."""


class SnapshotNotification:
    """Counts rings."""

    def __init__(self, place: Path) -> None:
        """Listen to the bell in *place*; raise ``OSError`` when that cannot be."""
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
            self.ring()

    def ring(self) -> None:
        """Wake everybody who waits."""
        with self._heard:
            self._count += 1
            self._heard.notify_all()

    def count(self) -> int:
        """Return how often it has rung."""
        with self._heard:
            return self._count

    def wait(self, count: int, seconds: float = ANYWAY) -> None:
        """Sleep until it has rung more than *count* times, or *seconds* have passed."""
        with self._heard:
            self._heard.wait_for(lambda: self._count > count, seconds)
