"""When to copy: a schedule for the coming steps from the wait windows of past ones. Pure, standard library only.

Where a stage of a pipeline waits depends on the stage: the first in the middle of the step, the last at both ends. So each
rank profiles its own windows and places its own slices in them. The ranks agree only on the interval between snapshots: the largest that
any of them needs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from holdfast.runtime.telemetry.wait_windows import WaitWindow

PROFILE: Final = 5
"""Steps that are profiled before the first schedule, without a copy in them."""
KEPT: Final = 32
"""Newest steps that a prediction uses."""
LOW: Final = 0.2
"""The quantile of a window's lengths that is predicted."""
MARGIN: Final = 0.1
"""Fraction of every window that is left free."""
RESERVE: Final = 1.5
"""The chosen windows must hold the copy this many times: windows can be shorter than predicted."""
USEFUL: Final = 5e-4
"""Seconds; shorter windows are not used while longer ones are enough."""
DRIFT: Final = 0.2
"""Relative change of step time or idle time that leads to a new schedule."""
TRIFLE: Final = 1e-3
"""Seconds; no snapshot is skipped for a shorter pause."""
MOST_EVERY: Final = 1000


@dataclass(frozen=True, slots=True)
class PredictedWindow:
    """A window that the coming steps will have: its number in the step, what it waits for, begin and length in seconds."""

    number: int
    kind: str
    begin: float
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySchedule:
    """How a snapshot is copied."""

    upto: Mapping[int, int] = field(default_factory=dict)
    """By the number of a window: up to which slice may be copied in it; other windows are not used."""
    everywhere: bool = False
    """All windows may be used for all slices."""
    slices: int = 0
    every: int = 1
    """Steps between two snapshots that this rank needs."""
    spread: float = 0.0
    """Seconds of a step over which the copy is spread when waits are not visible; 0: only windows are used."""
    step: float = 0.0
    """Expected seconds of a step."""
    idle: float = 0.0
    """Expected seconds of a step in windows."""
    copy: float = 0.0
    """Seconds of copying."""
    overlapped: float = 0.0
    """Seconds of copying during which training goes on or waits anyway."""
    reason: str = ""

    @property
    def pause(self) -> float:
        """Return the predicted seconds for which training pauses for one snapshot."""
        return max(0.0, self.copy - self.overlapped)

    @property
    def overhead(self) -> float:
        """Return the predicted fraction of the training time."""
        return self.pause / self.every / self.step if self.step else 0.0

    def gate(self, window: int) -> int:
        """Return up to which slice may be copied in the window of this number."""
        return self.slices if self.everywhere else self.upto.get(window, 0)


class Profile:
    """Windows and step times of the newest steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, tuple[WaitWindow, ...]]] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, seconds: float, windows: Sequence[WaitWindow]) -> None:
        """Add a step."""
        self._steps.append((seconds, tuple(windows)))

    def clear(self) -> None:
        """Start again: the ranks have changed."""
        self._steps.clear()

    def keep_newest(self) -> None:
        """Drop all but the newest steps: the earlier ones are no longer representative."""
        self._steps = deque(list(self._steps)[-PROFILE:], maxlen=KEPT)

    @property
    def step(self) -> float:
        """Return the median seconds of a step."""
        return median(seconds for seconds, _ in self._steps) if self._steps else 0.0

    @property
    def idle(self) -> float:
        """Return the median seconds of a step in windows."""
        return median(sum(one.end - one.begin for one in windows) for _, windows in self._steps) if self._steps else 0.0

    def predicted(self) -> list[PredictedWindow]:
        """Return the windows that can be expected, in the order of a step.

        A window is identified by its number, that is by how many waits of the step came before it. One that is missing in a step was
        too short to be recorded there.
        """
        by_number: dict[int, list[WaitWindow]] = {}
        for _, windows in self._steps:
            for one in windows:
                by_number.setdefault(one.number, []).append(one)
        found = []
        for number, seen in sorted(by_number.items()):
            lengths = sorted([0.0] * (len(self._steps) - len(seen)) + [one.end - one.begin for one in seen])
            length = lengths[int(LOW * (len(lengths) - 1))]
            if length > 0:
                kind = Counter(one.kind for one in seen).most_common(1)[0][0]
                found.append(PredictedWindow(number, kind, median(one.begin for one in seen), length))
        return found

    def has_drifted(self, schedule: CopySchedule) -> bool:
        """Return whether the newest steps differ from those that *schedule* expects."""
        if len(self._steps) < PROFILE:
            return False
        recent = list(self._steps)[-PROFILE:]
        step = median(seconds for seconds, _ in recent)
        idle = median(sum(one.end - one.begin for one in windows) for _, windows in recent)
        allowed_idle = DRIFT * max(schedule.idle, 0.1 * schedule.step)
        return abs(step - schedule.step) > DRIFT * schedule.step or abs(idle - schedule.idle) > allowed_idle


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLimits:
    """What the job allows snapshots to cost."""

    every: int = 1
    """Minimum steps between two snapshots; 0: none are taken."""
    overhead: float = 0.01
    """Maximum fraction of the training time."""
    policy: str = "skip"
    """What to do when a copy does not fit into the windows: ``skip`` steps, or ``pause`` in each."""
    pause: float = 0.1
    """Maximum seconds of a pause."""
    concurrent: bool = False
    """Copies run concurrently with training, as on a GPU, whose waits are not visible from outside."""


def plan(profile: Profile, sizes: Sequence[int], bandwidth: float, limits: SnapshotLimits, paused: float | None = None) -> CopySchedule:
    """Return how to copy slices of these *sizes* (bytes) at *bandwidth* (bytes per second) in the windows of *profile*.

    *paused*: measured seconds for which training paused for a snapshot that used all windows; without it they are predicted.

    Copies that run concurrently with training are spread over the step; what does not fit there, and what was *paused*, counts as a pause.

    Long windows are used first, so that short waits are not disturbed; as many as hold the copy `RESERVE` times. When all of them
    together are too small, the rest is a pause before the state changes: at every step if the limits allow that, else every n-th.
    """
    copy, step = sum(sizes) / bandwidth, profile.step
    windows = profile.predicted()
    facts = {"slices": len(sizes), "step": step, "idle": profile.idle, "copy": copy}
    spread = 0.8 * step
    if limits.concurrent and spread:
        pause = max(0.0, copy - spread) if paused is None else paused
        every, why = _interval(pause, step, limits) if pause else (max(1, limits.every), "its waits are not visible from outside")
        reason = f"the copy is spread over the step, concurrently with training: {why}"
        return CopySchedule(spread=spread, every=every, overlapped=copy - min(pause, copy), reason=reason, **facts)  # type: ignore[arg-type]
    if not windows and copy <= spread:
        reason = "the copy is spread over the step, concurrently with training: its waits are not visible from outside"
        return CopySchedule(spread=spread, every=max(1, limits.every), overlapped=copy, reason=reason, **facts)  # type: ignore[arg-type]
    chosen: list[PredictedWindow] = []
    for one in sorted(windows, key=lambda one: -one.length):
        if sum(each.length for each in chosen) * (1 - MARGIN) >= RESERVE * copy:
            break
        if one.length >= USEFUL or not chosen:
            chosen.append(one)
    upto, placed = _place_slices(sorted(chosen, key=lambda one: one.number), sizes, bandwidth)
    overlapped = sum(sizes[:placed]) / bandwidth
    if placed == len(sizes):
        reason = f"all of it fits into {len(chosen)} of {len(windows)} windows of the step"
        return CopySchedule(upto=upto, every=max(1, limits.every), overlapped=overlapped, reason=reason, **facts)  # type: ignore[arg-type]
    pause = copy - overlapped if paused is None else paused
    overlapped = copy - min(pause, copy)
    every, why = _interval(pause, step, limits)
    reason = f"{_ms(copy)} of copying do not fit into {_ms(sum(one.length for one in windows))} of windows: {why}"
    everything = {one.number: len(sizes) for one in windows}
    return CopySchedule(upto=everything, every=every, overlapped=overlapped, reason=reason, **facts)  # type: ignore[arg-type]


def _place_slices(windows: Sequence[PredictedWindow], sizes: Sequence[int], bandwidth: float) -> tuple[dict[int, int], int]:
    """Return up to which slice each window may copy, and how many slices have a window.

    A window that is shorter than predicted leaves its slices to those after it.
    """
    upto: dict[int, int] = {}
    placed = 0
    for one in windows:
        room = one.length * (1 - MARGIN)
        while placed < len(sizes) and sizes[placed] / bandwidth <= room:
            room -= sizes[placed] / bandwidth
            placed += 1
        upto[one.number] = placed
    return upto, placed


def _interval(pause: float, step: float, limits: SnapshotLimits) -> tuple[int, str]:
    """Return the steps between two snapshots that pause training for *pause* seconds each, and the reason."""
    every = max(1, limits.every)
    if limits.policy == "pause" and pause <= limits.pause:
        return every, f"training pauses {_ms(pause)} for each snapshot, as the policy allows"
    if pause <= TRIFLE:
        return every, f"training pauses {_ms(pause)} for each snapshot, too short to skip one"
    needed = math.ceil(pause / (limits.overhead * step)) if step and limits.overhead else MOST_EVERY
    every = min(max(every, needed), MOST_EVERY)
    return every, f"a snapshot every {every} steps keeps the cost at {pause / every / step:.1%}" if step else "there is no step yet"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
