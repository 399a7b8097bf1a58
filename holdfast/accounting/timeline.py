"""A job's timeline for the accounts: numbers and names, times in microseconds since 1970. `timeline_reader` reads it from the history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from holdfast.accounting.ledger import SECOND

Micros = np.ndarray[Any, np.dtype[np.int64]]
COLUMNS: Final = np.dtype([("generation", "i8"), ("step", "i8"), ("at", "f8"), ("seconds", "f8")])
TYPICAL_STEPS: Final = 100
"""Steps after a generation's first one whose median is how long that one should have taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpan:
    """One generation."""

    number: int
    at: int
    devices: int
    first_step_at: int | None = None
    """Its first step, or for scripts that report none the launch of its ranks."""
    snapshots: float = 0.0
    """Share of its step time that snapshots took."""


class PhaseTime(NamedTuple):
    """One phase of a recovery."""

    name: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSpan:
    """One incident: the job did not train from *fault_at* to *recovered_at*."""

    id: str
    number: int
    kind: str
    fault_at: int
    recovered_at: int
    generation_after: int | None
    outcome: str | None = None
    until_started: bool = False
    """It ends with the start of the processes, because no step was reported: training may have resumed later."""
    phases: Sequence[PhaseTime] = ()
    """In order, without the rollback."""

    @property
    def stalled(self) -> bool:
        """Return whether it interrupted the work of its generation: one that resolved by itself did not."""
        return self.outcome != "passed"


class SaveSpan(NamedTuple):
    """A checkpoint for which training stopped for *stall* microseconds."""

    at: int
    generation: int
    stall: int


class Spares(NamedTuple):
    """From *at* on, so many devices of the job's nodes have no rank."""

    at: int
    devices: int


class StepSpan(NamedTuple):
    """Consecutive steps of one generation, from position *first* to before *last*, all kept or all lost."""

    first: int
    last: int
    lost_to: int | None
    """The generation that rolled them back; None if they were kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """The steps of one generation in order, without overlaps."""

    begin: Micros
    end: Micros
    sums: Micros
    """Microseconds of all steps before each position; one element more than there are steps."""
    spans: Sequence[StepSpan]
    numbers: Micros
    """Step numbers."""

    def lost_since(self, begin: int) -> int:
        """Return how many steps that ended after *begin* were lost; if a script reports every tenth step, each report counts as ten."""
        between = np.diff(self.numbers)
        weights = np.concatenate(([between.min() if len(between) else 1], between))
        lost = [slice(span.first, span.last) for span in self.spans if span.lost_to is not None]
        return sum(int(weights[part][self.end[part] > begin].sum()) for part in lost)

    def within(self, begin: int, end: int) -> Iterator[tuple[int | None, int]]:
        """Yield the step time from *begin* to *end*: the generation that it was lost to, and microseconds."""
        low, high = int(np.searchsorted(self.end, begin, "right")), int(np.searchsorted(self.begin, end, "left"))
        for span in self.spans:
            first, last = max(low, span.first), min(high, span.last)
            if first >= last:
                continue
            before, after = max(0, begin - int(self.begin[first])), max(0, int(self.end[last - 1]) - end)
            yield span.lost_to, int(self.sums[last] - self.sums[first]) - before - after


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimeline:
    """One job from *begin* to *end*."""

    begin: int
    end: int
    ended: bool
    devices: int
    """Until the first generation is known."""
    generations: Sequence[GenerationSpan] = ()
    incidents: Sequence[IncidentSpan] = ()
    steps: Mapping[int, StepSpans] = field(default_factory=dict)
    """By generation."""
    reports_steps: bool = True
    saves: Sequence[SaveSpan] = ()
    spares: Sequence[Spares] = ()
    suspensions: Sequence[tuple[int, int]] = ()
    """Begin and end of each suspension: the job held no nodes then, and that time is not booked."""
    full_devices: int = 0
    """Devices at the requested size."""


def step_spans(table: np.ndarray[Any, Any], resumed_after: Mapping[int, int], *, until: int) -> dict[int, StepSpans]:
    """Return the steps in *table* (`COLUMNS`, ordered by generation and step) by generation.

    *resumed_after* is the step after which a generation resumed, for those that reported it. A step begins at the earliest when the one
    before it ended, however the clock was set, and ends by *until*. What a generation's first step takes beyond a typical step does
    not count as step time: compilation, cold caches.
    """
    if not len(table):
        return {}
    length = np.rint(np.nan_to_num(table["seconds"], nan=0.0).clip(0.0, 1e9) * SECOND).astype(np.int64)
    end = np.maximum.accumulate(np.minimum(np.rint(table["at"] * SECOND).astype(np.int64), until))
    begin = np.maximum(end - length, np.concatenate(([np.iinfo(np.int64).min], end[:-1])))
    numbers, firsts = (found.tolist() for found in np.unique(table["generation"], return_index=True))
    bounds = dict(zip(numbers, zip(firsts, [*firsts[1:], len(table)], strict=True), strict=True))
    resumed = {number: int(table["step"][first]) - 1 for number, (first, _) in bounds.items()} | dict(resumed_after)
    found, later = {}, list[tuple[int, int]]()
    for number in sorted(resumed, reverse=True):
        if number in bounds:
            first, last = bounds[number]
            if last - first > 1:
                begin[first] = max(begin[first], end[first] - int(np.median(length[first + 1 : first + 1 + TYPICAL_STEPS])))
            found[number] = StepSpans(
                begin=begin[first:last],
                end=end[first:last],
                sums=np.concatenate(([0], np.cumsum(end[first:last] - begin[first:last]))),
                spans=list(_split(table["step"][first:last], reversed(later))),
                numbers=table["step"][first:last],
            )
        while later and later[-1][1] >= resumed[number]:  # an earlier generation that rolls back further takes all steps of the later one
            later.pop()
        later.append((number, resumed[number]))
    return found


def _split(steps: Micros, later: Iterable[tuple[int, int]]) -> Iterator[StepSpan]:
    """Split a generation's *steps* by what they were lost to: *later* generations with the steps that they resumed after, descending."""
    last = len(steps)
    for number, resumed_after in later:
        first = int(np.searchsorted(steps, resumed_after, "right"))
        if first < last:
            yield StepSpan(first, last, number)
            last = first
        if not first:
            return
    if last:
        yield StepSpan(0, last, None)
