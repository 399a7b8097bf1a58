"""When this process waits: the windows of a step in which training does nothing, and how a step spent its time.

Windows are opened around waits for other ranks (point-to-point operations, collectives, the vote) and for data. Only what is visible from
the host is recorded: on a GPU a wait for a collective returns at once, and the copy schedule spreads copies over the step instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from holdfast.runtime.telemetry import progress

MIN_SECONDS: Final = 50e-6
"""Shorter waits are not recorded: they end before anybody could use them."""
MAX_WINDOWS: Final = 2000
"""Windows that are kept of one step."""

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
    """A wait: begin and end in seconds since the step began, what it was for, and its number in the step, from 1."""

    begin: float
    end: float
    kind: str
    number: int


class WaitWindows:
    """The windows of the current step. Cheap: it is called at every wait, whether anything is copied or not."""

    def __init__(self) -> None:
        self.open = False
        """Whether training waits now."""
        self.wake: threading.Event | None = None
        """Set while training waits; the copying thread sleeps on it."""
        self.windows: list[WaitWindow] = []
        self.step_began = time.perf_counter()
        self.number = 0
        """Windows of this step that were opened so far."""
        self.operations: list[tuple[str, int]] = []
        """Point-to-point operations of this step, with their peers: they identify the schedule of a pipeline."""
        self.sums: dict[str, float] = {}
        """Seconds of all waits since this process started, by kind."""
        self.closed_at = 0.0
        """When the newest window was closed (`time.perf_counter`)."""
        self._since, self._kind = 0.0, ""
        self._in_flight = self._started = self._usual = 0
        self._lock = threading.Lock()

    def begin_step(self) -> tuple[float, list[WaitWindow], list[tuple[str, int]]]:
        """Begin a step; return the length of the one before, its windows and its point-to-point operations."""
        now = time.perf_counter()
        took, windows, operations = now - self.step_began, self.windows, self.operations
        self.step_began, self.windows, self.operations, self.number = now, [], [], 0
        self._usual, self._started = self._started, 0
        return took, windows, operations

    def enter(self, kind: str) -> bool:
        """Open a window; return False when one is open already: only the caller that opened it closes it with `leave`."""
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
        now = self.closed_at = time.perf_counter()
        self.sums[self._kind] = self.sums.get(self._kind, 0.0) + now - self._since
        if now - self._since >= MIN_SECONDS and len(self.windows) < MAX_WINDOWS:
            self.windows.append(WaitWindow(self._since - self.step_began, now - self.step_began, self._kind, self.number))

    def current(self) -> tuple[str, float]:
        """Return what training waits for now, and for how many seconds; ("", 0) while it does not wait. Callable from any thread."""
        kind, since = self._kind, self._since
        return (kind, time.perf_counter() - since) if self.open else ("", 0.0)

    # -- waits inside torch ---------------------------------------------------------------------------------------------

    def operation_started(self) -> None:
        """Record an operation that torch itself waits for, as DDP's reducer does for its buckets.

        After the last one of a step nothing is left to compute: training waits until all have ended. Which one is the last is known from
        the step before.
        """
        with self._lock:
            self._started += 1
            self._in_flight += 1
            last = self._started == self._usual
        if last:
            self.enter("gradients")

    def operation_ended(self) -> None:
        """Record the end of such an operation."""
        with self._lock:
            self._in_flight -= 1
            ends = self._in_flight <= 0 and self.open and self._kind == "gradients"
        if ends:
            self.leave()


_of_this_process = WaitWindows()


def process_waits() -> WaitWindows:
    """Return this process's windows."""
    return _of_this_process


class StepTimer:
    """Measures how each step spends its time: own work, waiting for other ranks, waiting for data.

    On a device the host's clock does not tell own work from waiting: a wait for a collective returns at once, and the time shows only where
    the rank waits for its device, before the vote. There *device* gives the seconds of the step and those of its waits.
    """

    def __init__(self, windows: WaitWindows | None = None, device: Callable[[], tuple[float, float] | None] = lambda: None) -> None:
        self._waits, self._device = windows or process_waits(), device
        self._since: float | None = None
        self._sums: dict[str, float] = {}
        self._sections = progress.sections_begun()

    def begin(self) -> None:
        """Begin to measure: the time before belongs to no step (a save, a recovery, the startup)."""
        self._since, self._sums, self._sections = time.perf_counter(), dict(self._waits.sums), progress.sections_begun()

    def end(self) -> dict[str, float] | None:
        """Return the seconds of own work, of communication (``talk``) and of waiting for data; None for a step with a declared section."""
        if self._since is None or progress.sections_begun() != self._sections:
            return None
        took = time.perf_counter() - self._since
        waited = {kind: total - self._sums.get(kind, 0.0) for kind, total in self._waits.sums.items()}
        data, on_device = waited.pop("data", 0.0), waited.pop("device", None)
        talk, measured = sum(waited.values()), self._device()
        if measured is not None:
            took, talk = measured
        elif on_device:
            return None
        return {"own": round(max(0.0, took - talk - data), 6), "talk": round(talk, 6), "data": round(data, 6)}
