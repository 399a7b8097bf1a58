"""Whoever is left when the agent dies takes everything along that the agent had started.

A worker dies with its agent by the kernel's death signal, but what a worker has forked would live on. Such orphans come to the nearest
living subreaper: the agent while it lives, its parent, the guardian, after that. Against the loss of both stands the sentinel: no orphan
comes to it, but it kills by the mark that all of them carry in their environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from holdfast.process import AGENT_MARK, become_subreaper, die_with_parent, end_children, kill, sweep


def guard(agent: Callable[[], int], agent_id: str) -> int:
    """Run *agent* in a child and return its status; when it has ended, however it ended, leave no process of it behind."""
    become_subreaper()
    guardian = os.getpid()
    alive, life = os.pipe()  # the agent alone holds the writing end: its end of life is the end of the file
    child = os.fork()
    if child == 0:
        os.close(alive)
        become_subreaper()
        die_with_parent(guardian, signal.SIGTERM)
        os._exit(agent())
    os.close(life)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: kill(child, signal.SIGTERM))
    status, sentinel = _wait(child, alive, agent_id)
    end_children(spare=sentinel)  # it stays until everything is done: we may be killed as well
    end_children()
    return status


def _wait(child: int, alive: int, agent_id: str) -> tuple[int, int]:
    """Return the agent's exit status; keep a sentinel all the while, and return its pid."""
    sentinel = _post_sentinel(child, alive, agent_id)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status), sentinel
        if pid == sentinel and status:  # one that ends by itself has seen the agent's end
            sentinel = _post_sentinel(child, alive, agent_id)


def _post_sentinel(agent: int, alive: int, agent_id: str) -> int:
    guardian = os.getpid()
    sentinel = os.fork()
    if sentinel:
        return sentinel
    try:
        os.setsid()  # out of the reach of a kill of the whole group
        _keep_only(alive)
        signal.signal(signal.SIGTERM, lambda *_: kill(agent, signal.SIGCONT))
        die_with_parent(guardian, signal.SIGTERM)  # the agent has got SIGTERM as well: one that was stopped must go on to take it
        os.read(alive, 1)
        sweep(AGENT_MARK, agent_id, seconds=60.0)
    finally:
        os._exit(0)


def _keep_only(descriptor: int) -> None:
    """Close what belongs to the guardian: its lock must not be held by us."""
    with os.scandir("/proc/self/fd") as entries:
        others = {int(entry.name) for entry in entries} - {0, 1, 2, descriptor}
    for other in others:
        try:
            os.close(other)
        except OSError:  # the scan's own
            continue
