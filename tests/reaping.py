"""How the children of a program that forks for tests have ended."""

from __future__ import annotations

import os


class Children:
    """The children of this process, by pid."""

    def __init__(self) -> None:
        self._ended: dict[int, int] = {}

    def begun(self, pid: int) -> None:
        """Take in a new child: a long run of the tests uses the number of one that has ended again."""
        self._ended.pop(pid, None)

    def ended(self) -> dict[str, int]:
        """Return the exit status (negative: the signal) of every child that has ended, by pid, as JSON has it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            self._ended[pid] = os.waitstatus_to_exitcode(status)
        return {str(pid): status for pid, status in self._ended.items()}
