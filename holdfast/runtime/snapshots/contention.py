"""Whether the cores are saturated: for how long this thread was ready to run, and another one ran."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

FILE: Final = "/proc/thread-self/schedstat"


class RunDelay:
    """Tells how long the thread that made it has waited for a core; always nothing where the kernel keeps no such count."""

    def __init__(self, file: str = FILE) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._told()

    def _told(self) -> int:
        """Return the nanoseconds so far."""
        with suppress(OSError, ValueError, IndexError):  # a negative descriptor is an OSError too
            return int(os.pread(self._file, 128, 0).split()[1])
        return 0

    def since(self) -> float:
        """Return the seconds since the last question."""
        now = self._told()
        waited, self._before = now - self._before, now
        return max(0, waited) / 1e9

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
