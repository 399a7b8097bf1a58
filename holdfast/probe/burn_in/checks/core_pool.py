"""One process for each processor of this node, pinned to it: a bad core is found only by work on that core.

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

from detectors.burn_in_results import Check, CheckMark

MOST: Final = 1 << 16
"""Bytes that one answer may have."""
BROKEN: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals by which sound programs do not end on sound processors and memory."""


@dataclass(frozen=True, slots=True)
class CoreEnded:
    """A process that ended without an answer."""

    status: int
    """As `os.waitstatus_to_exitcode` has it: negative is a signal."""

    @property
    def is_fault(self) -> bool:
        """Tell whether its end speaks against the node: to run out of memory, or to be ended by somebody, does not."""
        return -self.status in BROKEN

    def __str__(self) -> str:
        return f"ended by {signal.Signals(-self.status).name}" if self.status < 0 else f"ended with status {self.status}"


def processors() -> list[int]:
    """Return the processors that this process may use."""
    return sorted(os.sched_getaffinity(0))


def on_each(cores: list[int], work: Callable[[int], dict[str, Any]]) -> dict[int, dict[str, Any] | CoreEnded]:
    """Run *work* (of a core's place among *cores*) pinned to each core, all at once; return their answers by core."""
    children = {_started(core, place, work): core for place, core in enumerate(cores)}
    found: dict[int, dict[str, Any] | CoreEnded] = {}
    with selectors.DefaultSelector() as selector:
        for pid, pipe in children:
            selector.register(pipe, selectors.EVENT_READ, (pid, bytearray()))
        while selector.get_map():
            for key, _events in selector.select():
                pid, told = key.data
                data = os.read(key.fd, MOST)
                told += data
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    found[children[pid, key.fd]] = _answer(pid, bytes(told))
    return dict(sorted(found.items()))


def judged(name: str, found: dict[int, dict[str, Any] | CoreEnded], figures: dict[str, float], *, fine: str, seconds: float) -> Check:
    """Return the check that all cores' answers make: `wrong` of each is what it saw, and empty where all is *fine*."""
    wrong = [f"core {core}: {one if isinstance(one, CoreEnded) else one['wrong']}" for core, one in found.items() if _is_wrong(one)]
    lost = [f"core {core}: its process {one}" for core, one in found.items() if isinstance(one, CoreEnded)]
    mark = CheckMark.FAILED if wrong else CheckMark.SKIPPED if lost else CheckMark.PASSED
    return Check(name=name, mark=mark, words="; ".join(wrong or lost or [fine])[:1000], figures=figures, seconds=seconds)


def _is_wrong(one: dict[str, Any] | CoreEnded) -> bool:
    return one.is_fault if isinstance(one, CoreEnded) else bool(one["wrong"])


def _answer(pid: int, told: bytes) -> dict[str, Any] | CoreEnded:
    _, status = os.waitpid(pid, 0)
    try:
        answer: dict[str, Any] = json.loads(told)
    except ValueError:
        return CoreEnded(os.waitstatus_to_exitcode(status))
    return answer


def _started(core: int, place: int, work: Callable[[int], dict[str, Any]]) -> tuple[int, int]:
    ours, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.sched_setaffinity(0, {core})
            answer = work(place)
            with os.fdopen(its, "wb") as out:
                out.write(json.dumps(answer).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(its)
    return pid, ours
