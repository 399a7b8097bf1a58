"""What one rank has measured of its steps and copies, and the plan that follows from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from holdfast.runtime.snapshots import copy_schedule
from holdfast.runtime.snapshots.copy_schedule import MOST_EVERY, TRIFLE, CopySchedule, Profile, Terms
from holdfast.runtime.snapshots.overhead import Overhead
from holdfast.runtime.telemetry.wait_windows import WaitWindow

FIRST_BANDWIDTH: Final = 2e9
"""Bytes a second that the first plan counts on, before a copy was measured; host memory is several times faster."""
ENOUGH: Final = 4
"""Snapshots whose pauses tell more than a prediction."""
REPLAN: Final = 10
"""Steps between two plans at least."""
SATURATED: Final = 0.05
"""Share of the newest steps for which the training thread was ready and had no core: what a copy uses is then missing elsewhere."""
HARMLESS: Final = 0.125
"""Share of the limit; copies that take less of a processor need not be measured: sending them on takes a few times as much."""


class StepMeasurements:
    """Plans one rank's snapshots anew when they are no longer what the plan counts on."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.profile = Profile()
        self.plan: CopySchedule | None = None
        self.pauses: deque[float] = deque(maxlen=2 * ENOUGH)
        """Seconds for which training stood still for each of the newest snapshots."""
        self.overhead = Overhead(terms.overhead)
        self._spent: deque[float] = deque(maxlen=ENOUGH + 1)
        """Seconds of a processor that the newest copies took."""
        self._delays: deque[float] = deque(maxlen=2 * ENOUGH)
        """Share of the newest steps for which the training thread waited for a core."""
        self._used: deque[float] = deque(maxlen=2 * ENOUGH)
        """Seconds of processors that this process used in the newest steps, without those of copies."""
        self._compares = False
        """Snapshots may cost too much: steps with and without one are compared."""
        self._bandwidth, self._copies = FIRST_BANDWIDTH, 0
        self._planned_at, self._from_measured = 0, False
        self._steps = 0

    def forget(self) -> None:
        """Begin anew: this process takes another rank, or shares its work with others."""
        self.plan = None
        self.profile.forget()
        self.pauses.clear()
        self.overhead.forget()

    def lived(self, seconds: float, windows: Sequence[WaitWindow], *, copied: bool, delay: float = 0.0, used: float = 0.0) -> None:
        """Learn what a step was like, and whether a snapshot was taken in it.

        *delay*: seconds for which training was ready and waited for a core; *used*: of processors, by this process, without copies.
        """
        self.profile.add(seconds, windows)
        self._delays.append(delay / seconds if seconds > 0 else 0.0)
        self._used.append(used)
        self.overhead.add(seconds, copied=copied)
        if not self._compares and len(self._spent) >= ENOUGH and self._terms.policy != "pause":  # that asks for one whatever it costs
            spent = median(self._spent) + (median(self.pauses) if self.pauses else 0.0)
            self._compares = spent > TRIFLE and spent > HARMLESS * self._terms.overhead * self.profile.step

    @property
    def _least(self) -> int:
        """Return the interval below which the copies alone, without what follows from them, would take more than the limit.

        Known after a few copies, and whatever the steps of a busy machine scatter by: where cores are what training waits for, a step takes
        longer by the share by which it needs them more. On free cores nobody misses what a copy uses.
        """
        if not self._delays or median(self._delays) < SATURATED or not median(self._used):
            return 1
        share = median(self._spent) / median(self._used)
        return min(MOST_EVERY, max(1, math.ceil(share / self._terms.overhead)))

    def measured(self, size: int, seconds: float) -> None:
        """Learn that copying *size* bytes took *seconds*."""
        self._spent.append(seconds)
        if size and seconds > 0:
            self._bandwidth = size / seconds if not self._copies else 0.8 * self._bandwidth + 0.2 * size / seconds
            self._copies += 1

    @property
    def wanted(self) -> int:
        """Every how many steps this rank would take a snapshot; the largest number of all ranks counts."""
        planned = self.plan.every if self.plan is not None else max(1, self._terms.every)
        return max(planned, self.overhead.every, self._least) if self._compares else planned

    @property
    def control(self) -> int:
        """Every how many steps this rank wants control steps, without a snapshot; 0: never. The smallest number of all ranks counts."""
        return self.overhead.cycle if self._compares else 0

    def plan_for(self, sizes: Sequence[int]) -> CopySchedule:
        """Return how to copy slices of these *sizes*, in bytes."""
        self._steps += 1
        if len(self.profile) < copy_schedule.PROFILE:  # a process that has just come in: it copies whenever it waits
            return CopySchedule(upto=_Everything(len(sizes)), slices=len(sizes))
        if self.plan is None or self._is_stale(self.plan, len(sizes)):
            if self.plan is not None and self.profile.has_drifted(self.plan):
                self.profile.keep_newest()
            paused = median(self.pauses) if len(self.pauses) >= ENOUGH else None
            self.plan = copy_schedule.plan(self.profile, sizes, self._bandwidth, self._terms, paused)
            self._planned_at, self._from_measured = self._steps, self._copies > 0
        return self.plan

    def _is_stale(self, plan: CopySchedule, slices: int) -> bool:
        """Tell whether there is a better plan to be had than *plan*."""
        if plan.slices != slices or (self._copies > 0 and not self._from_measured):
            return True
        due = self._steps >= self._planned_at + REPLAN
        return due and (plan.pause > 0 or self.profile.has_drifted(plan))


class _Everything(dict[int, int]):
    """Lets every window take all slices."""

    def __init__(self, slices: int) -> None:
        super().__init__()
        self._slices = slices

    def get(self, _window: int, _default: int = 0) -> int:  # type: ignore[override]
        return self._slices
