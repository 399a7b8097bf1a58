"""The steps of a job as pieces of time that do not overlap, and which of them were kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from holdfast.accounting.ledger import SECOND

Micros = np.ndarray[Any, np.dtype[np.int64]]
COLUMNS: Final = np.dtype([("generation", "i8"), ("step", "i8"), ("at", "f8"), ("seconds", "f8")])
USUAL: Final = 100
"""Steps after a generation's first one that say how long that one should have taken."""


class StepSpan(NamedTuple):
    """Neighbouring steps of one generation, *first* to before *last* by their place, with one fate."""

    first: int
    last: int
    lost_to: int | None
    """The generation that went back to before them; none where they were kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """The steps of one generation, in their order; times in microseconds since 1970."""

    begin: Micros
    end: Micros
    sums: Micros
    """Microseconds of the steps before each place, one more than there are steps."""
    stretches: Sequence[StepSpan]
    numbers: Micros
    """Their numbers."""

    def lost_since(self, begin: int) -> int:
        """Return how many steps that ended after *begin* were lost; of a script that reports one in ten each report stands for ten."""
        between = np.diff(self.numbers)
        stands_for = np.concatenate(([between.min() if len(between) else 1], between))
        found = 0
        for stretch in self.stretches:
            if stretch.lost_to is not None:
                mine = slice(stretch.first, stretch.last)
                found += int(stands_for[mine][self.end[mine] > begin].sum())
        return found

    def within(self, begin: int, end: int) -> Iterator[tuple[int | None, int]]:
        """Yield what of the steps lies from *begin* to *end*: the generation they were lost to, and microseconds."""
        low, high = int(np.searchsorted(self.end, begin, "right")), int(np.searchsorted(self.begin, end, "left"))
        for stretch in self.stretches:
            first, last = max(low, stretch.first), min(high, stretch.last)
            if first >= last:
                continue
            before, after = max(0, begin - int(self.begin[first])), max(0, int(self.end[last - 1]) - end)
            yield stretch.lost_to, int(self.sums[last] - self.sums[first]) - before - after


def pieces(table: np.ndarray[Any, Any], back_to: Mapping[int, int], *, until: int) -> dict[int, StepSpans]:
    """Return the steps in *table* (`COLUMNS`, ordered by generation and step), by generation.

    *back_to* says which step a generation went on after, for those that told. A step begins when the one before it ended at the earliest,
    wherever the clock stood, and ends by *until*. Of a generation's first step what goes beyond a usual one is not the step's: there
    something is compiled, or caches fill.
    """
    if not len(table):
        return {}
    length = np.rint(np.nan_to_num(table["seconds"], nan=0.0).clip(0.0, 1e9) * SECOND).astype(np.int64)
    end = np.maximum.accumulate(np.minimum(np.rint(table["at"] * SECOND).astype(np.int64), until))
    begin = np.maximum(end - length, np.concatenate(([np.iinfo(np.int64).min], end[:-1])))
    numbers, firsts = (found.tolist() for found in np.unique(table["generation"], return_index=True))
    bounds = dict(zip(numbers, zip(firsts, [*firsts[1:], len(table)], strict=True), strict=True))
    goals = {number: int(table["step"][first]) - 1 for number, (first, _) in bounds.items()} | dict(back_to)
    found, later = {}, list[tuple[int, int]]()
    for number in sorted(goals, reverse=True):
        if number in bounds:
            first, last = bounds[number]
            if last - first > 1:
                begin[first] = max(begin[first], end[first] - int(np.median(length[first + 1 : first + 1 + USUAL])))
            found[number] = StepSpans(
                begin=begin[first:last],
                end=end[first:last],
                sums=np.concatenate(([0], np.cumsum(end[first:last] - begin[first:last]))),
                stretches=list(_stretches(table["step"][first:last], reversed(later))),
                numbers=table["step"][first:last],
            )
        while later and later[-1][1] >= goals[number]:  # whoever goes back further, and earlier, has all that the later one would have
            later.pop()
        later.append((number, goals[number]))
    return found


def _stretches(steps: Micros, later: Iterable[tuple[int, int]]) -> Iterator[StepSpan]:
    """Part a generation's *steps* by whom they were lost to: *later* generations with the steps they went on after, ever smaller."""
    last = len(steps)
    for number, goal in later:
        first = int(np.searchsorted(steps, goal, "right"))
        if first < last:
            yield StepSpan(first, last, number)
            last = first
        if not first:
            return
    if last:
        yield StepSpan(0, last, None)
