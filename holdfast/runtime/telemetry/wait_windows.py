"""When this process waits: the windows of a step in which training does nothing, noted as they come and told to who can use them.

Windows are opened around waits for other ranks (point-to-point, collectives, the vote) and for data. Only what a process can see from
outside its device is seen here: on a GPU a wait for a collective returns at once, and copies are paced by the plan instead.
"""

from __future__ import annotations

import threading
import time
from typing import Final, NamedTuple

LEAST: Final = 50e-6
"""Seconds; a shorter wait is none: it passes before anybody could use it."""
MOST: Final = 2000
"""Windows that one step keeps."""

_KINDS: Final = {
    "recv": "pipeline",
    "send": "pipeline",
    "allreduce": "gradients",
    "allreduce_coalesced": "gradients",
    "reduce": "gradients",
    "allgather": "shards",
    "all_gather_single": "shards",
    "reduce_scatter": "shards",
    "reduce_scatter_single": "shards",
}


def kind_of(operation: str) -> str:
    """Return the kind of window that a wait for *operation* opens."""
    return _KINDS.get(operation[:4], "") or _KINDS.get(operation, "collective")


class WaitWindow(NamedTuple):
    """A wait: begin and end in seconds since the step began, what was waited for, and the how manieth of the step it was, from 1."""

    begin: float
    end: float
    kind: str
    number: int


class WaitWindows:
    """The windows of the step in work. Cheap: it is asked at every wait, whether anybody copies or not."""

    def __init__(self) -> None:
        self.open = False
        """Whether training waits now."""
        self.wake: threading.Event | None = None
        """Set while training waits; who copies sleeps on it."""
        self.windows: list[WaitWindow] = []
        self.step_began = time.perf_counter()
        self.number = 0
        """Windows of this step that were opened so far."""
        self.operations: list[tuple[str, int]] = []
        """Point-to-point operations of this step, with their peers: what the schedule of a pipeline is recognised by."""
        self.sums: dict[str, float] = {}
        """Seconds of all waits since this process began, by what was waited for."""
        self.left = 0.0
        """When the newest window was closed (`time.perf_counter`)."""
        self._since, self._kind = 0.0, ""
        self._flying = self._launched = self._usual = 0
        self._lock = threading.Lock()

    def begin_step(self) -> tuple[float, list[WaitWindow], list[tuple[str, int]]]:
        """Begin a step; return how long the one before took, its windows and its point-to-point operations."""
        now = time.perf_counter()
        took, windows, operations = now - self.step_began, self.windows, self.operations
        self.step_began, self.windows, self.operations, self.number = now, [], [], 0
        self._usual, self._launched = self._launched, 0
        return took, windows, operations

    def enter(self, kind: str) -> bool:
        """Open a window; tell whether there was none open: who opened it closes it with `leave`."""
        if self.open:
            return False
        self._since, self._kind, self.open = time.perf_counter(), kind, True
        self.number += 1
        if self.wake is not None:
            self.wake.set()
        return True

    def leave(self) -> None:
        """Close the window."""
        self.open = False
        if self.wake is not None:
            self.wake.clear()
        now = self.left = time.perf_counter()
        self.sums[self._kind] = self.sums.get(self._kind, 0.0) + now - self._since
        if now - self._since >= LEAST and len(self.windows) < MOST:
            self.windows.append(WaitWindow(self._since - self.step_began, now - self.step_began, self._kind, self.number))

    def present(self) -> tuple[str, float]:
        """Return what training waits for now, and for how many seconds it has; nothing while it does not wait. Callable from any thread."""
        kind, since = self._kind, self._since
        return (kind, time.perf_counter() - since) if self.open else ("", 0.0)

    # -- waits inside of torch ------------------------------------------------------------------------------------------

    def operation_started(self) -> None:
        """Note an operation whose end torch itself awaits, as DDP's reducer does for its buckets.

        After the last one of a step nothing is left to compute: until all have ended training waits. Which one is the last is known
        from the step before.
        """
        with self._lock:
            self._launched += 1
            self._flying += 1
            last = self._launched == self._usual
        if last:
            self.enter("gradients")

    def operation_ended(self) -> None:
        """Note that such an operation has ended."""
        with self._lock:
            self._flying -= 1
            ends = self._flying <= 0 and self.open and self._kind == "gradients"
        if ends:
            self.leave()


_ours = WaitWindows()


def process_waits() -> WaitWindows:
    """Return this process's windows."""
    return _ours
