"""Let a process end in peace: torch's gloo threads may outlive the interpreter, and then take the process down with them.

Standard library only.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_GLOO: Final = "(pt_gloo_runloop) "

STILL: Final = 3
"""Looks in a row, a millisecond apart, that must find the threads at rest."""


def wait_until_idle(seconds: float = 1.0) -> bool:
    """Wait until gloo's threads have let go of their last operation; to be called when the process is about to end.

    Seen with torch 2.13: the thread that ran the last collective wakes the waiting rank first and frees the operation
    after that, for which it needs the interpreter. If the rank has ended by then, Python ends the thread in a place where
    C++ forbids it ("terminate called without an active exception"), and training that was done ends with SIGABRT.
    """
    deadline, still = time.monotonic() + seconds, 0
    while still < STILL:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)  # lets such a thread have the interpreter
        still = 0 if _busy() else still + 1
    return True


def _busy() -> bool:
    """Say whether any of gloo's threads runs, or would if there were a processor for it."""
    for task in Path("/proc/self/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except OSError:  # it ended while we looked
            continue
        if _GLOO in stat and stat.partition(_GLOO)[2].startswith("R"):
            return True
    return False
