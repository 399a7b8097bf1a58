"""When to copy: from the windows of past steps to a plan for the coming ones. Pure, and on the standard library alone.

Where a stage of a pipeline waits depends on the stage: the first in the middle of the step, the last at both its ends (docs/architecture.md
has the table). So each rank profiles its own windows and packs its own slices; what the ranks must agree on, how often a snapshot is taken,
is the largest number that any of them asks for.
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
"""Steps that are looked at before the first plan, without a copy in them."""
KEPT: Final = 32
"""Newest steps that a prediction rests on."""
LOW: Final = 0.2
"""Which quantile of a window's lengths is counted on."""
MARGIN: Final = 0.1
"""Share of every window that is left free."""
RESERVE: Final = 1.5
"""How many times over the chosen windows must hold the copy: windows come shorter than they were."""
USEFUL: Final = 5e-4
"""Seconds; a shorter window is left alone as long as longer ones are enough."""
DRIFT: Final = 0.2
"""Share by which step time or idle time may change before there is a new plan."""
TRIFLE: Final = 1e-3
"""Seconds; nobody leaves a snapshot out for a shorter pause."""
MOST_EVERY: Final = 1000


@dataclass(frozen=True, slots=True)
class Predicted:
    """A window that the coming steps will have: its number in the step, what it waits for, begin and length in seconds."""

    number: int
    kind: str
    begin: float
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySchedule:
    """How a snapshot is taken."""

    upto: Mapping[int, int] = field(default_factory=dict)
    """Up to which slice may be copied in each window, by its number; windows that are not named may not be used."""
    slices: int = 0
    every: int = 1
    """Steps between two snapshots that this rank asks for."""
    beside: float = 0.0
    """Seconds of a step over which the copy is spread where no waits can be seen."""
    step: float = 0.0
    """Seconds of a step that the plan counts on."""
    idle: float = 0.0
    """Seconds of it in windows."""
    copy: float = 0.0
    """Seconds of copying."""
    overlapped: float = 0.0
    """Seconds of copying that the windows hold."""
    reason: str = ""

    @property
    def pause(self) -> float:
        """Seconds for which training is predicted to stand still for one snapshot."""
        return 0.0 if self.beside else max(0.0, self.copy - self.overlapped)

    @property
    def overhead(self) -> float:
        """Predicted share of the training time."""
        return self.pause / self.every / self.step if self.step else 0.0

    def gate(self, window: int) -> int:
        """Return up to which slice may be copied in the window of this number."""
        return self.upto.get(window, 0)


class Profile:
    """Windows and step times of the newest steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, tuple[WaitWindow, ...]]] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, seconds: float, windows: Sequence[WaitWindow]) -> None:
        """Take note of a step."""
        self._steps.append((seconds, tuple(windows)))

    def forget(self) -> None:
        """Begin anew: the ranks have changed."""
        self._steps.clear()

    def keep_newest(self) -> None:
        """Forget all but the newest steps: the ones before were of another kind."""
        self._steps = deque(list(self._steps)[-PROFILE:], maxlen=KEPT)

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return median(seconds for seconds, _ in self._steps) if self._steps else 0.0

    @property
    def idle(self) -> float:
        """Median seconds in windows of a step."""
        return median(sum(one.end - one.begin for one in windows) for _, windows in self._steps) if self._steps else 0.0

    def predicted(self) -> list[Predicted]:
        """Return the windows that can be counted on, in the order of a step.

        A window is told by its number: how many waits of the step came before it. One that is missing in a step was shorter than
        anything worth noting there.
        """
        lengths: dict[int, list[float]] = {}
        begins: dict[int, list[float]] = {}
        kinds: dict[int, Counter[str]] = {}
        for _, windows in self._steps:
            for one in windows:
                lengths.setdefault(one.number, []).append(one.end - one.begin)
                begins.setdefault(one.number, []).append(one.begin)
                kinds.setdefault(one.number, Counter())[one.kind] += 1
        found = []
        for number, seen in sorted(lengths.items()):
            whole = sorted([0.0] * (len(self._steps) - len(seen)) + seen)
            length = whole[int(LOW * (len(whole) - 1))]
            if length > 0:
                found.append(Predicted(number, kinds[number].most_common(1)[0][0], median(begins[number]), length))
        return found

    def has_drifted(self, plan: CopySchedule) -> bool:
        """Tell whether the newest steps are no longer what *plan* counts on."""
        if len(self._steps) < PROFILE:
            return False
        recent = list(self._steps)[-PROFILE:]
        step = median(seconds for seconds, _ in recent)
        idle = median(sum(one.end - one.begin for one in windows) for _, windows in recent)
        return abs(step - plan.step) > DRIFT * plan.step or abs(idle - plan.idle) > max(DRIFT * plan.idle, DRIFT * 0.1 * plan.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the job allows."""

    every: int = 1
    """Steps between two snapshots at least; 0: none are taken."""
    overhead: float = 0.01
    """Share of the training time that snapshots may cost."""
    policy: str = "skip"
    """What to do when a copy does not fit: ``skip`` steps, or ``pause`` in each."""
    pause: float = 0.1
    """Seconds of the longest pause."""
    beside: bool = False
    """Whether copies run beside training anyway, as those of a GPU do, whose waits cannot be seen from outside."""


def plan(profile: Profile, sizes: Sequence[int], bandwidth: float, terms: Terms, paused: float | None = None) -> CopySchedule:
    """Return how to copy slices of these *sizes* (bytes) at *bandwidth* (bytes a second) in the windows of *profile*.

    *paused*: seconds for which training did stand still for a snapshot that used all windows; who has measured need not predict.

    Long windows go first, so that short waits are left in peace; as many are taken as hold the copy `RESERVE` times over. When all of them
    together are too small, what is left over is a pause before the state changes: at every step if the terms allow that, else every n-th.
    """
    copy, step = sum(sizes) / bandwidth, profile.step
    windows = profile.predicted()
    facts = {"slices": len(sizes), "step": step, "idle": profile.idle, "copy": copy}
    if not windows or terms.beside:
        spread = 0.8 * step
        if copy <= spread:
            reason = "the copy is spread over the step, beside what training does: its waits cannot be seen from outside"
            return CopySchedule(beside=spread, every=max(1, terms.every), overlapped=copy, reason=reason, **facts)  # type: ignore[arg-type]
    chosen = _chosen(windows, copy)
    upto, placed = _pack(chosen, sizes, bandwidth)
    overlapped = sum(sizes[:placed]) / bandwidth
    if placed == len(sizes):
        reason = f"all of it fits into {len(chosen)} of {len(windows)} windows of the step"
        return CopySchedule(upto=upto, every=max(1, terms.every), overlapped=overlapped, reason=reason, **facts)  # type: ignore[arg-type]
    left = copy - overlapped if paused is None else paused
    overlapped = copy - min(left, copy)
    every, why = _seldom(left, step, terms)
    reason = f"{_ms(copy)} of copying do not fit into {_ms(sum(one.length for one in windows))} of windows: {why}"
    everything = {one.number: len(sizes) for one in windows}
    return CopySchedule(upto=everything, every=every, overlapped=overlapped, reason=reason, **facts)  # type: ignore[arg-type]


def _chosen(windows: Sequence[Predicted], copy: float) -> list[Predicted]:
    """Return the longest windows, as many as are enough, in the order of the step."""
    found: list[Predicted] = []
    for one in sorted(windows, key=lambda one: -one.length):
        if sum(each.length for each in found) * (1 - MARGIN) >= RESERVE * copy:
            break
        if one.length >= USEFUL or not found:
            found.append(one)
    return sorted(found, key=lambda one: one.number)


def _pack(windows: Sequence[Predicted], sizes: Sequence[int], bandwidth: float) -> tuple[dict[int, int], int]:
    """Return up to which slice each window may take, and how many slices have a place."""
    upto: dict[int, int] = {}
    placed = 0
    for one in windows:
        room = one.length * (1 - MARGIN)
        while placed < len(sizes) and sizes[placed] / bandwidth <= room:
            room -= sizes[placed] / bandwidth
            placed += 1
        upto[one.number] = placed
    # A window that comes shorter than predicted leaves its slices to those after it; the last ones may take whatever is left.
    return upto, placed


def _seldom(left: float, step: float, terms: Terms) -> tuple[int, str]:
    """Return every how many steps to take a snapshot that pauses training for *left* seconds, and why in words."""
    least = max(1, terms.every)
    if terms.policy == "pause" and left <= terms.pause:
        return least, f"training pauses {_ms(left)} for each snapshot, as the policy allows"
    if left <= TRIFLE:
        return least, f"training pauses {_ms(left)} for each snapshot, too short to leave one out"
    wanted = math.ceil(left / (terms.overhead * step)) if step and terms.overhead else MOST_EVERY
    every = min(max(least, wanted), MOST_EVERY)
    return every, f"a snapshot every {every} steps keeps the cost at {left / every / step:.1%}" if step else "there is no step yet"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
