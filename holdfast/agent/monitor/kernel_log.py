"""Follow the kernel's log: one reader, whose lines go to all subscribers."""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.detectors.nodes.readings import KernelLine
from holdfast.log import note
from holdfast.probe.readers.kernel import KMSG, KernelLog

log = logging.getLogger("holdfast.agent")

KERNEL_LOG: Final = Path("/") / KMSG
POLL: Final = 0.2
"""Seconds between two reads of an ordinary file, for which no selector can wait."""


class KernelLogFollower:
    """Follows the kernel's log: `/dev/kmsg`, or a file in which a syslog daemon keeps it. *blind* says why it cannot be read."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        self.path = path
        self.blind: str | None = None
        self._log: KernelLog | None = None
        self._polled = False
        """No selector can wait for it, as for any ordinary file."""
        self._next = 0.0
        self._subscribers: list[Callable[[KernelLine], None]] = []
        self._open(from_end=True)

    def _open(self, *, from_end: bool) -> None:
        try:
            self._log = KernelLog(self.path, from_end=from_end, plain=self.path != KERNEL_LOG)
        except OSError as error:
            self.blind = f"{self.path}: {error.strerror}"

    def subscribe(self, take: Callable[[KernelLine], None]) -> None:
        """Call *take* with every line that is read from now on."""
        self._subscribers.append(take)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have lines read as they come."""
        if self._log is not None:
            try:
                selector.register(self._log, selectors.EVENT_READ, lambda _mask: self._read_or_close(selector))
            except PermissionError:
                self._polled = True

    def _read_or_close(self, selector: selectors.BaseSelector) -> None:
        """Read; close an unreadable log, which would wake the selector for ever."""
        try:
            self.read()
        except OSError as error:
            assert self._log is not None
            selector.unregister(self._log)
            self._log.close()
            self._log, self.blind = None, f"{self.path}: {error.strerror}"
            note(log, "kernel-log.lost", why=self.blind)

    def read(self) -> None:
        """Pass on the lines that have come since the last time."""
        if self._log is None:
            return
        for line in self._log.read():
            for take in self._subscribers:
                take(line)

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return self._next if self._log is not None and self._polled else None

    def tick(self, now: float) -> None:
        """Read a file for which no selector can wait, and the next one once it has been rotated."""
        if self._log is None or not self._polled or now < self._next:
            return
        self._next = time.monotonic() + POLL
        self.read()
        try:
            rotated = not os.path.samestat(self.path.stat(), os.fstat(self._log.fileno()))
        except OSError:
            rotated = False
        if rotated:
            self._log.close()
            self._open(from_end=False)
