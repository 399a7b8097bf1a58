"""What one rank has measured of its steps and copies, and the copy schedule that follows from it."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import Final

from holdfast.runtime.snapshots import copy_schedule
from holdfast.runtime.snapshots.copy_schedule import MOST_EVERY, TRIFLE, CopySchedule, Profile, SnapshotLimits
from holdfast.runtime.snapshots.overhead import Overhead
from holdfast.runtime.telemetry.wait_windows import WaitWindow

FIRST_BANDWIDTH: Final = 2e9
"""Bytes per second that the first schedule assumes before a copy was measured; host memory is several times faster."""
ENOUGH: Final = 4
"""Snapshots whose measured pauses replace the prediction."""
REPLAN: Final = 10
"""Minimum steps between two schedules."""
SATURATED: Final = 0.05
"""Fraction of the newest steps for which the training thread was ready and had no core: copies then take time from training."""
HARMLESS: Final = 0.125
"""Fraction of the limit; copies that use less processor time are not measured: replication uses a few times as much."""
SCHEDSTAT: Final = "/proc/thread-self/schedstat"


class RunDelay:
    """Measures how long the thread that created it waits for a core; always 0 where the kernel does not count it."""

    def __init__(self, file: str = SCHEDSTAT) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._nanoseconds()

    def _nanoseconds(self) -> int:
        with suppress(OSError, ValueError, IndexError):  # a negative descriptor is an OSError too
            return int(os.pread(self._file, 128, 0).split()[1])
        return 0

    def since(self) -> float:
        """Return the seconds since the last call."""
        now = self._nanoseconds()
        waited, self._before = now - self._before, now
        return max(0, waited) / 1e9

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class StepMeasurements:
    """Schedules one rank's snapshots, again when the steps have changed."""

    def __init__(self, limits: SnapshotLimits) -> None:
        self._limits = limits
        self.profile = Profile()
        self.plan: CopySchedule | None = None
        self.pauses: deque[float] = deque(maxlen=2 * ENOUGH)
        """Seconds for which training paused for each of the newest snapshots."""
        self.overhead = Overhead(limits.overhead)
        self._spent: deque[float] = deque(maxlen=ENOUGH + 1)
        """Seconds of the newest copies, of the processor or the device."""
        self._delays: deque[float] = deque(maxlen=2 * ENOUGH)
        """Fraction of the newest steps for which the training thread waited for a core."""
        self._used: deque[float] = deque(maxlen=2 * ENOUGH)
        """Processor seconds of this process in the newest steps, without those of copies."""
        self._compares = False
        """Snapshots may cost too much: steps with and without one are compared."""
        self._bandwidth, self._copies = FIRST_BANDWIDTH, 0
        self._planned_at, self._from_measured = 0, False
        self._steps = 0

    def reset(self) -> None:
        """Start again: this process takes another rank, or shares its work with others."""
        self.plan = None
        self.profile.clear()
        self.pauses.clear()
        self.overhead.reset()

    def add_step(self, seconds: float, windows: Sequence[WaitWindow], *, copied: bool, delay: float = 0.0, used: float = 0.0) -> None:
        """Add a step and whether a snapshot was taken in it.

        *delay*: seconds for which training waited for a core; *used*: processor seconds of this process without copies.
        """
        self.profile.add(seconds, windows)
        self._delays.append(delay / seconds if seconds > 0 else 0.0)
        self._used.append(used)
        self.overhead.add(seconds, copied=copied)
        if not self._compares and len(self._spent) >= ENOUGH and self._limits.policy != "pause":  # which takes one at any cost
            spent = median(self._spent) + (median(self.pauses) if self.pauses else 0.0)
            self._compares = spent > TRIFLE and spent > HARMLESS * self._limits.overhead * self.profile.step

    def add_copy(self, size: int, seconds: float) -> None:
        """Add a copy of *size* bytes that took *seconds* of the processor or the device."""
        self._spent.append(seconds)
        if size and seconds > 0:
            self._bandwidth = size / seconds if not self._copies else 0.8 * self._bandwidth + 0.2 * size / seconds
            self._copies += 1

    @property
    def wanted(self) -> int:
        """Return the steps between two snapshots that this rank needs; the largest number of all ranks is used.

        On saturated cores a step becomes longer by the fraction that copies add to its processor time. That gives a lower bound after a
        few copies, however much the steps vary. On free cores, and where a device copies, they take nothing from training.
        """
        planned = self.plan.every if self.plan is not None else max(1, self._limits.every)
        if not self._compares:
            return planned
        least = 1
        if not self._limits.concurrent and self._delays and median(self._delays) >= SATURATED and median(self._used):
            fraction = median(self._spent) / median(self._used)
            least = min(MOST_EVERY, max(1, math.ceil(fraction / self._limits.overhead)))
        return max(planned, self.overhead.every, least)

    @property
    def control(self) -> int:
        """Return the steps between control steps, which are without a snapshot; 0: none. The smallest number of all ranks is used."""
        return self.overhead.cycle if self._compares else 0

    def plan_for(self, sizes: Sequence[int]) -> CopySchedule:
        """Return how to copy slices of these *sizes*, in bytes."""
        self._steps += 1
        if len(self.profile) < copy_schedule.PROFILE:  # a process that has just started copies whenever it waits
            return CopySchedule(everywhere=True, slices=len(sizes))
        if self.plan is None or self._is_outdated(self.plan, len(sizes)):
            if self.plan is not None and self.profile.has_drifted(self.plan):
                self.profile.keep_newest()
            paused = median(self.pauses) if len(self.pauses) >= ENOUGH else None
            self.plan = copy_schedule.plan(self.profile, sizes, self._bandwidth, self._limits, paused)
            self._planned_at, self._from_measured = self._steps, self._copies > 0
        return self.plan

    def _is_outdated(self, plan: CopySchedule, slices: int) -> bool:
        if plan.slices != slices or (self._copies > 0 and not self._from_measured):
            return True
        due = self._steps >= self._planned_at + REPLAN
        pauses = self._limits.concurrent and bool(self.pauses) and median(self.pauses) > TRIFLE  # a device is slower than its schedule says
        return due and (plan.pause > 0 or pauses or self.profile.has_drifted(plan))
