"""Run the agent under a subreaper, so that nothing that the agent has started outlives it.

A worker dies with its agent by the kernel's death signal, but a worker's forks would live on. Such orphans become children of the nearest
living subreaper: the agent while it lives, its parent, which is this process, after that. Against the loss of both there is a sentinel: it
gets no orphans, but kills by the mark that all of them carry in their environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

from holdfast.host.process import AGENT_MARK, become_subreaper, die_with_parent, end_children, kill, sweep

PASSED_ON: Final = signal.SIGRTMIN + 7
"""What the subreaper sends the agent when it gets SIGTERM itself: the agent may get the same SIGTERM too, at any distance in time, and must
not take the two for a second request. (The C library keeps the first two real-time signals, and debuggers and profilers use the next.)"""


def guard(agent: Callable[[], int], agent_id: str) -> int:
    """Run *agent* in a child and return its exit status; once it has ended, in whatever way, end every process that it left."""
    become_subreaper()
    parent = os.getpid()
    agent_ended, agent_alive = os.pipe()  # only the agent holds the writing end: the file ends when the agent does
    child = os.fork()
    if child == 0:
        os.close(agent_ended)
        become_subreaper()
        die_with_parent(parent, signal.SIGTERM)
        os._exit(agent())
    os.close(agent_alive)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: kill(child, PASSED_ON))
    sentinel = _start_sentinel(child, agent_ended, agent_id)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
        if pid == sentinel and status:  # one that exits by itself has seen the agent's end
            sentinel = _start_sentinel(child, agent_ended, agent_id)
    end_children(spare=sentinel)  # the sentinel stays to the last: this process may be killed as well
    end_children()
    return os.waitstatus_to_exitcode(status)


def _start_sentinel(agent: int, agent_ended: int, agent_id: str) -> int:
    parent = os.getpid()
    sentinel = os.fork()
    if sentinel:
        return sentinel
    try:
        os.setsid()  # so that a kill of the whole process group does not reach it
        with os.scandir("/proc/self/fd") as entries:
            others = {int(entry.name) for entry in entries} - {0, 1, 2, agent_ended}
        for other in others:  # the lock of the node among them
            try:
                os.close(other)
            except OSError:  # the scan's own
                continue
        signal.signal(signal.SIGTERM, lambda *_: kill(agent, signal.SIGCONT))
        die_with_parent(parent, signal.SIGTERM)  # the agent has got SIGTERM as well: a stopped one must be continued to take it
        os.read(agent_ended, 1)
        sweep(AGENT_MARK, agent_id, seconds=60.0)
    finally:
        os._exit(0)
