"""The agent's parent: the process that is left when the agent dies, and takes everything the agent had started along.

A worker dies with its agent by the kernel's death signal, but what a worker has forked would live on. Those orphans come to the nearest
living subreaper: the agent while it lives, this guardian after that.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from holdfast.process import adopt_orphans, children_of, die_with_parent, kill


def guard(agent: Callable[[], int]) -> int:
    """Run *agent* in a child and return its status; when it has ended, however it ended, leave no process of it behind."""
    adopt_orphans()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        adopt_orphans()
        die_with_parent(parent, signal.SIGTERM)
        os._exit(agent())
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: kill(child, signal.SIGTERM))
    status = _wait(child)
    _end_all()
    return status


def _wait(child: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _end_all() -> None:
    """Kill orphans until none is left: each dead one may hand its own children up to us."""
    while True:
        for pid in children_of(os.getpid()):
            kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.005)
