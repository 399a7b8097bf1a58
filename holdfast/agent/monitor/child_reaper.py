"""The lookout's own children, reaped the moment they end: left alone they would be zombies, and a look at the node would report them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final

DESCRIPTORS: Final = 256
"""The lookout has a dozen open."""


class ChildReaper:
    """Forks that run beside this process, and how each of them ended. One for each process: it takes SIGCHLD."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())

    def fork(self, keep: int) -> int:
        """Fork; return the child's pid, and in the child 0 with nothing open but *keep* and the standard descriptors."""
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.closerange(3, keep)  # a socket that the child held open would never end
            os.closerange(keep + 1, DESCRIPTORS)
        else:
            self._ended.pop(pid, None)  # of an earlier child with this number, whose status nobody asked for
            self._running.add(pid)
            self._reap()  # it may have ended before it was known here
        return pid

    def status(self, pid: int) -> int | None:
        """Return the exit status of a child (negative: the signal), and forget it; None while it has not ended."""
        self._reap()
        return self._ended.pop(pid, None)

    def _reap(self) -> None:
        for pid in tuple(self._running):
            with suppress(ChildProcessError):
                gone, status = os.waitpid(pid, os.WNOHANG)
                if not gone:
                    continue
                self._ended[pid] = os.waitstatus_to_exitcode(status)
            self._running.discard(pid)
