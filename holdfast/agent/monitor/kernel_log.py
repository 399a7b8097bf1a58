"""The kernel's log as the agent follows it: one reader, whose lines go to all who want them."""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from detectors.readings import KernelLine
from holdfast.log import note
from holdfast.probe.readers.kernel import KMSG, KernelLog

log = logging.getLogger("holdfast.agent")

KERNEL_LOG: Final = Path("/") / KMSG
POLL: Final = 0.2
"""Seconds between two readings of an ordinary file, which cannot be waited for."""


class KernelLogFollower:
    """Follows the kernel's log: `/dev/kmsg`, or a file in which a syslog daemon keeps it. Says in *blind* why it cannot."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        self.path = path
        self.blind: str | None = None
        self._log: KernelLog | None = None
        self._polled = False
        """It cannot be waited for, as ordinary files cannot."""
        self._next = 0.0
        self._heard: list[Callable[[KernelLine], None]] = []
        self._open(from_end=True)

    def _open(self, *, from_end: bool) -> None:
        try:
            self._log = KernelLog(self.path, from_end=from_end, plain=self.path != KERNEL_LOG)
        except OSError as error:
            self.blind = f"{self.path}: {error.strerror}"

    def tell(self, heard: Callable[[KernelLine], None]) -> None:
        """Call *heard* with every line that is read from now on."""
        self._heard.append(heard)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have lines read as they come."""
        if self._log is not None:
            try:
                selector.register(self._log, selectors.EVENT_READ, lambda _mask: self._wake(selector))
            except PermissionError:
                self._polled = True

    def _wake(self, selector: selectors.BaseSelector) -> None:
        """Read; a log that has become unreadable would wake us for ever."""
        try:
            self.read()
        except OSError as error:
            assert self._log is not None
            selector.unregister(self._log)
            self._log.close()
            self._log, self.blind = None, f"{self.path}: {error.strerror}"
            note(log, "kernel-log.lost", why=self.blind)

    def read(self) -> None:
        """Hand on the lines that have come since the last time."""
        if self._log is None:
            return
        for line in self._log.read():
            for heard in self._heard:
                heard(line)

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return self._next if self._log is not None and self._polled else None

    def tick(self, now: float) -> None:
        """Read a file that cannot be waited for."""
        if self._log is not None and self._polled and now >= self._next:
            self._next = time.monotonic() + POLL
            self.read()
            if self._was_replaced():
                self._log.close()
                self._open(from_end=False)

    def _was_replaced(self) -> bool:
        """Tell whether the file was put aside for a new one, as logs are once they have become large."""
        assert self._log is not None
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._log.fileno()))
        except OSError:
            return False
