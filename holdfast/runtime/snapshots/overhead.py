"""What snapshots take from training: steps with a snapshot beside steps without, and the interval that keeps it below the limit. Pure.

The seconds of the copying thread say little: on a machine whose cores are all busy they are missing elsewhere, caches are emptied, and
replicas are sent by other processes. So the steps themselves are compared, of which all ranks have the same. Where a snapshot is taken at
nearly every step, a few steps are left without one from time to time (*control steps*), on all ranks alike.

A *cycle* ends with control steps: steps that began at least `CLEAN` steps after the newest snapshot did. Each cycle gives one estimate of
what a snapshot costs, from medians of neighbouring steps; the figure is the median of the newest cycles, with its standard error. A single
slow step, like an evaluation or a recovery, changes neither.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from holdfast.runtime.snapshots.copy_schedule import MOST_EVERY, TRIFLE

CLEAN: Final = 2
"""Steps after which nothing of a snapshot is left: it is copied in the first, and sent to another node in this one and the next."""
GAP: Final = 3
"""Steps without a snapshot at the end of a cycle; all but the first of them are control steps."""
NEIGHBOURS: Final = 8
"""Newest steps of a kind that a cycle's estimate rests on: the machine may have been another one before."""
FIRST: Final = 8
"""Steps of each of the first cycles."""
OFTEN: Final = 16
"""Steps of a cycle while it is not clear what snapshots cost."""
SELDOM: Final = 64
"""Steps of a cycle once it is."""
DENSE: Final = CLEAN + 1
"""Up to this interval there are no control steps unless snapshots are left out for their sake."""
ENOUGH: Final = 3
"""Cycles before anything follows from them."""
RECENT: Final = 5
"""Newest cycles that are compared with all: what differs from them was another time."""
KEPT: Final = 48
"""Newest cycles that the figure rests on."""
SURE: Final = 2.0
"""Standard errors between the figure and the limit from which on it is clear on which side it is."""
APART: Final = 3.0
"""Standard errors between the newest cycles and all from which on the older ones are forgotten."""
TIRED: Final = 24
"""Cycles after which control steps become rarer in any case."""
FEW: Final = 3
"""The doubt about so many cycles is twice that of their scatter: theirs may be small by chance."""
SHRINK: Final = 0.7
"""The interval is shortened only to less than this share of it: an estimate that scatters must not move it up and down."""


def is_control(step: int, every: int, cycle: int) -> bool:
    """Tell whether the snapshot after *step* is left out, to have steps to compare with: the last ones of each *cycle* steps; 0: none."""
    return cycle > 0 and every <= DENSE and step % cycle >= cycle - GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one snapshot costs."""

    share: float
    """Seconds that it takes from training, as a share of a step without."""
    error: float
    """Its standard error."""
    step: float
    """Seconds of a step without."""
    cycles: int

    @property
    def seconds(self) -> float:
        """Return the seconds that a snapshot takes from training; scatter may have them below zero."""
        return max(0.0, self.share * self.step)


@dataclass(slots=True)
class _Cycle:
    """Seconds of the newest steps since the first snapshot after the newest control steps."""

    copied: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS))
    """In which a snapshot was taken, right after one in which another one was."""
    first: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS))
    """In which a snapshot was taken, after one without."""
    after: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS))
    """The next ones, without one."""
    clean: deque[float] = field(default_factory=lambda: deque(maxlen=2 * NEIGHBOURS))
    """Control steps."""

    def estimate(self) -> tuple[float, float]:
        """Return what a snapshot costs as a share of a step without, and the seconds of such a step."""
        bare = median(self.clean)
        if len(self.copied) >= len(self.first):  # at every step: what the one before left is in each
            return median(self.copied) / bare - 1, bare
        left = median(self.after) / bare - 1 if self.after else 0.0
        return median(self.first) / bare - 1 + left, bare


class Overhead:
    """Measures what snapshots cost one rank's training, and says how often to take them."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._cycles: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """Estimates, each with the seconds of a step without."""
        self._cycle: _Cycle | None = None
        self._age = 0
        """Steps since the newest snapshot."""
        self.every = 1
        """Steps between two snapshots that keep the cost below the limit."""

    def forget(self) -> None:
        """Begin anew: ranks or work have changed."""
        self._cycles.clear()
        self._cycle, self._age, self.every = None, 0, 1

    def interrupt(self) -> None:
        """Use nothing of the cycle in work: something else was in its steps."""
        self._cycle = None

    def add(self, seconds: float, *, copied: bool) -> None:
        """Take note of a step, and whether a snapshot was taken in it."""
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
        self._cycles.append(cycle.estimate())
        if len(self._cycles) > 2 * RECENT:
            newest = list(self._cycles)[-RECENT:]
            middle, error = _middle([share for share, _ in self._cycles], RECENT)
            if abs(median(share for share, _ in newest) - middle) > max(APART * error, self._limit):
                self._cycles = deque(newest, maxlen=KEPT)
        self.every = self._decided()

    def _decided(self) -> int:
        found = self.measured
        if found is None:
            return self.every
        if found.seconds <= TRIFLE:
            return 1
        wanted = min(MOST_EVERY, max(1, math.ceil(found.share / self._limit)))
        doubt = found.error * (1 + FEW / found.cycles)
        grows = wanted > self.every and found.share - doubt > self._limit
        shrinks = found.share + doubt < SHRINK * self.every * self._limit
        return wanted if grows or shrinks else self.every

    @property
    def measured(self) -> Measured | None:
        """Return what a snapshot costs; None before enough steps were compared."""
        if len(self._cycles) < ENOUGH:
            return None
        share, error = _middle([share for share, _ in self._cycles])
        return Measured(share=share, error=error, step=median(step for _, step in self._cycles), cycles=len(self._cycles))

    @property
    def cycle(self) -> int:
        """Return how many steps lie between the control steps of two cycles."""
        found = self.measured
        if found is None or found.cycles <= RECENT:
            return FIRST
        sure = abs(found.share - self._limit) > SURE * found.error
        return SELDOM if sure or found.cycles >= TIRED else OFTEN


def _middle(values: list[float], count: int = 0) -> tuple[float, float]:
    """Return the median of *values* and the standard error of a median of *count* (default: all) of them; a few strays change neither."""
    middle = median(values)
    scatter = 1.4826 * median(abs(value - middle) for value in values)  # of a normal distribution with such a median deviation
    return middle, 1.2533 * scatter / math.sqrt(count or len(values))
