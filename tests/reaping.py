"""How the children of a program that forks for tests have ended."""

from __future__ import annotations

import os


def look(ended: dict[int, int]) -> None:
    """Add to *ended* the exit status (negative: the signal) of every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        ended[pid] = os.waitstatus_to_exitcode(status)
