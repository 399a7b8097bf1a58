"""What snapshots cost: steps with a snapshot compared with steps without, and the interval that keeps the cost below the limit. Pure.

The seconds of the copying thread say little: with all cores busy they are missing elsewhere, caches are emptied, and other processes send
replicas. So the steps themselves are compared; all ranks see the same. Where nearly every step has a snapshot, a few steps (*control
steps*) have none from time to time, on all ranks alike.

A *cycle* ends with control steps: steps that began at least `CLEAN` steps after the newest snapshot. Each cycle gives one estimate of the
cost of a snapshot from medians of neighbouring steps. The result is the median of the newest cycles with its standard error, which a
single slow step, like an evaluation or a recovery, does not change.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from holdfast.runtime.snapshots.copy_schedule import MOST_EVERY, TRIFLE

CLEAN: Final = 2
"""Steps that a snapshot affects: it is copied in the first, and replicated in this one and the next."""
GAP: Final = 3
"""Steps without a snapshot at the end of a cycle; all but the first of them are control steps."""
NEIGHBOURS: Final = 8
"""Newest steps of a kind that the estimate of a cycle uses: conditions may have changed before."""
FIRST: Final = 8
"""Steps of each of the first cycles."""
OFTEN: Final = 16
"""Steps of a cycle while the cost is not certain."""
SELDOM: Final = 64
"""Steps of a cycle once it is certain."""
DENSE: Final = CLEAN + 1
"""Up to this interval snapshots must be skipped to have control steps."""
ENOUGH: Final = 3
"""Minimum cycles for a result."""
RECENT: Final = 5
"""Newest cycles that are compared with all, to detect a change of conditions."""
KEPT: Final = 48
"""Newest cycles that the result uses."""
SURE: Final = 2.0
"""Standard errors between result and limit from which on the cost is certain."""
CHANGED: Final = 3.0
"""Standard errors between the newest cycles and all from which on the older ones are dropped."""
SETTLED: Final = 24
"""Cycles after which control steps become rarer in any case."""
FEW: Final = 3
"""With this many cycles the error counts twice: it may be small by chance."""
SHRINK: Final = 0.7
"""The interval is shortened only below this fraction of it: a noisy estimate must not make it oscillate."""


def is_control(step: int, every: int, cycle: int) -> bool:
    """Return whether the snapshot after *step* is skipped for a control step: the last steps of each *cycle* are; 0: none."""
    return cycle > 0 and every <= DENSE and step % cycle >= cycle - GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one snapshot costs."""

    share: float
    """Seconds that it adds, as a fraction of a step without."""
    error: float
    """Its standard error."""
    step: float
    """Seconds of a step without."""
    cycles: int

    @property
    def seconds(self) -> float:
        """Return the seconds that a snapshot adds to training; noise could make them negative."""
        return max(0.0, self.share * self.step)


@dataclass(slots=True)
class _Cycle:
    """Seconds of the newest steps since the first snapshot after the newest control steps."""

    copied: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS))
    """Steps with a snapshot, right after one with a snapshot."""
    first: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS))
    """Steps with a snapshot, after one without."""
    after: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS))
    """The steps after those, without a snapshot."""
    clean: deque[float] = field(default_factory=lambda: deque(maxlen=2 * NEIGHBOURS))
    """Control steps."""

    def estimate(self) -> tuple[float, float]:
        """Return the cost of a snapshot as a fraction of a step without, and the seconds of such a step."""
        base = median(self.clean)
        if len(self.copied) >= len(self.first):  # a snapshot at every step: each contains the after-effect of the one before
            return median(self.copied) / base - 1, base
        after_effect = median(self.after) / base - 1 if self.after else 0.0
        return median(self.first) / base - 1 + after_effect, base


class Overhead:
    """Measures what snapshots cost one rank's training, and the interval that keeps the cost below *limit*."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._cycles: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """Estimates, each with the seconds of a step without."""
        self._cycle: _Cycle | None = None
        self._age = 0
        """Steps since the newest snapshot."""
        self.every = 1
        """Steps between two snapshots that keep the cost below the limit."""

    def reset(self) -> None:
        """Start again: the ranks or the work have changed."""
        self._cycles.clear()
        self._cycle, self._age, self.every = None, 0, 1

    def interrupt(self) -> None:
        """Drop the current cycle: its steps contain something else."""
        self._cycle = None

    def add(self, seconds: float, *, copied: bool) -> None:
        """Add a step, and whether a snapshot was taken in it."""
        if seconds <= 0:
            return
        if copied:
            if self._cycle is not None and len(self._cycle.clean) >= CLEAN:
                self._close(self._cycle)
                self._cycle = None
            in_a_row = self._cycle is not None and self._age == 0
            self._cycle, self._age = self._cycle or _Cycle(), 0
            (self._cycle.copied if in_a_row else self._cycle.first).append(seconds)
            return
        self._age += 1
        if self._cycle is not None:
            (self._cycle.after if self._age < CLEAN else self._cycle.clean).append(seconds)

    def _close(self, cycle: _Cycle) -> None:
        """Add the estimate of *cycle*, and choose the interval anew."""
        self._cycles.append(cycle.estimate())
        if len(self._cycles) > 2 * RECENT:
            newest = list(self._cycles)[-RECENT:]
            middle, error = _middle([share for share, _ in self._cycles], RECENT)
            if abs(median(share for share, _ in newest) - middle) > max(CHANGED * error, self._limit):
                self._cycles = deque(newest, maxlen=KEPT)
        found = self.measured
        if found is None:
            return
        needed = min(MOST_EVERY, max(1, math.ceil(found.share / self._limit)))
        error = found.error * (1 + FEW / found.cycles)
        grows = needed > self.every and found.share - error > self._limit
        shrinks = found.share + error < SHRINK * self.every * self._limit
        if found.seconds <= TRIFLE:
            self.every = 1
        elif grows or shrinks:
            self.every = needed

    @property
    def measured(self) -> Measured | None:
        """Return the cost of a snapshot; None before enough steps were compared."""
        if len(self._cycles) < ENOUGH:
            return None
        share, error = _middle([share for share, _ in self._cycles])
        return Measured(share=share, error=error, step=median(step for _, step in self._cycles), cycles=len(self._cycles))

    @property
    def cycle(self) -> int:
        """Return the steps between the control steps of two cycles."""
        found = self.measured
        if found is None or found.cycles <= RECENT:
            return FIRST
        certain = abs(found.share - self._limit) > SURE * found.error
        return SELDOM if certain or found.cycles >= SETTLED else OFTEN


def _middle(values: list[float], count: int = 0) -> tuple[float, float]:
    """Return the median of *values* and the standard error of the median of *count* (default: all) of them; robust against outliers."""
    middle = median(values)
    scatter = 1.4826 * median(
        abs(value - middle) for value in values
    )  # the standard deviation of a normal distribution with this median deviation
    return middle, 1.2533 * scatter / math.sqrt(count or len(values))
