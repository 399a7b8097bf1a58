"""Run one process for each core of this node, pinned to it: a bad core is found only by work on that core.

The caller must be a process without threads, as `program` is.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark

MAX_ANSWER: Final = 1 << 16
"""Bytes of one answer."""
FAULT_SIGNALS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals by which correct programs do not end on healthy cores and memory."""


@dataclass(frozen=True, slots=True)
class CoreEnded:
    """A process that exited without an answer."""

    status: int
    """As from `os.waitstatus_to_exitcode`: negative is a signal."""

    @property
    def is_fault(self) -> bool:
        """Return whether its end is a fault of the node: running out of memory, or being killed by somebody, is not."""
        return -self.status in FAULT_SIGNALS

    def __str__(self) -> str:
        return f"ended by {signal.Signals(-self.status).name}" if self.status < 0 else f"exited with status {self.status}"


def processors() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def on_each(cores: list[int], work: Callable[[int], dict[str, Any]]) -> dict[int, dict[str, Any] | CoreEnded]:
    """Run *work* pinned to each core, all at once; it gets the core's index in *cores*. Return the answers by core."""
    children = {_start(core, index, work): core for index, core in enumerate(cores)}
    found: dict[int, dict[str, Any] | CoreEnded] = {}
    with selectors.DefaultSelector() as selector:
        for pid, pipe in children:
            selector.register(pipe, selectors.EVENT_READ, (pid, bytearray()))
        while selector.get_map():
            for key, _events in selector.select():
                pid, output = key.data
                data = os.read(key.fd, MAX_ANSWER)
                output += data
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    try:
                        found[children[pid, key.fd]] = json.loads(output)
                    except ValueError:
                        found[children[pid, key.fd]] = CoreEnded(os.waitstatus_to_exitcode(status))
    return dict(sorted(found.items()))


def judged(name: str, found: dict[int, dict[str, Any] | CoreEnded], figures: dict[str, float], *, fine: str, seconds: float) -> Check:
    """Return the check that all cores' answers make: `wrong` of each says what was wrong, and is empty where all is *fine*."""
    wrong, lost = [], []
    for core, one in found.items():
        if isinstance(one, CoreEnded):
            lost.append(f"core {core}: its process {one}")
            wrong += [f"core {core}: {one}"] if one.is_fault else []
        elif one["wrong"]:
            wrong.append(f"core {core}: {one['wrong']}")
    mark = CheckMark.FAILED if wrong else CheckMark.SKIPPED if lost else CheckMark.PASSED
    return Check(name=name, mark=mark, words="; ".join(wrong or lost or [fine])[:1000], figures=figures, seconds=seconds)


def _start(core: int, index: int, work: Callable[[int], dict[str, Any]]) -> tuple[int, int]:
    """Return the pid of the child, and the pipe that it writes its answer to."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.sched_setaffinity(0, {core})
            answer = work(index)
            with os.fdopen(theirs, "wb") as out:
                out.write(json.dumps(answer).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    return pid, ours
