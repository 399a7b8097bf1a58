"""Told to end: a process that gets SIGTERM goes on to the end of its step, so that all ranks can save it together."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Final

EXIT_STATUS: Final = 128 + signal.SIGTERM
"""What a shell calls the end by this signal: whoever has sent it sees that it was heard."""


class SigtermHandler:
    """Notices SIGTERM, which a stopped job, the end of a wall time and a spot instance's notice all send first."""

    def __init__(self) -> None:
        self.told = False
        """Whether this process is to end."""

    def listen(self) -> None:
        """Hear the signal from now on, unless the script hears it itself, or this is not the thread that could."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._heard)

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        """Take note. It may come again, from a batch system and from the agent: what is being saved by then must not be cut short."""
        self.told = True
