"""Who computes which samples of a step: the step's batch stays the same, however many copies of the model there are to share it.

A batch that is a whole step's is cut among the copies, the same way on all of them. Where fewer copies are left each computes more, in
several parts, so that no part is larger than with all of them there. A part's weight makes the mean over the copies, which is what DDP
forms of gradients, the mean over the samples of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """How a step's batch is shared out, as one copy of the model sees it."""

    place: int
    """This copy, counted from 0."""
    copies: int
    most: int | None = None
    """Samples that a copy computes at once at most; None: all of its share."""
    even: bool = False
    """Every part has as many samples as `most` says: for what is built for one size, like a pipeline."""

    def parts(self, samples: int) -> list[range]:
        """Return which of a batch's *samples* this copy computes, part by part: all copies have the same number of parts.

        Where there are fewer samples than parts some are left with none.
        """
        if self.even and self.most:
            units = [range(first, min(first + self.most, samples)) for first in range(0, samples, self.most)]
            mine = units[len(units) * self.place // self.copies : len(units) * (self.place + 1) // self.copies]
            return mine + [range(0)] * (-(-len(units) // self.copies) - len(mine))
        largest = -(-samples // self.copies)
        count = max(1, -(-largest // self.most)) if self.most else 1
        first, end = samples * self.place // self.copies, samples * (self.place + 1) // self.copies
        cuts = [first + (end - first) * part // count for part in range(count + 1)]
        return [range(begin, after) for begin, after in pairwise(cuts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShard:
    """One part of one copy's share of a step's batch."""

    samples: int
    of: int
    """Samples of the step's whole batch."""
    copies: int
    last: bool
    """The step has no further part for this copy."""

    @property
    def weight(self) -> float:
        """Return what the part's mean loss is to be multiplied by: 1 where all copies compute equally many samples, in one part."""
        return self.samples * self.copies / self.of


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a loop computes at once of a step."""

    batch: Any
    """What the `DataLoader` made of the samples."""
    weight: float
    """What the mean loss over the batch is to be multiplied by before ``backward``."""
    last: bool
    """The step has no further share for this rank: gradients are averaged over the ranks in its backward pass."""


def cut(batch: Sequence[Any], deal: BatchSplit) -> list[tuple[list[Any], BatchShard]]:
    """Return this copy's parts of a step's *batch* of samples. One without samples is given others' at a weight of 0."""
    parts = deal.parts(len(batch))
    others = list(batch[: deal.most if deal.even else 1])
    return [
        (
            [batch[number] for number in part] or others,
            BatchShard(samples=len(part), of=len(batch), copies=deal.copies, last=count == len(parts)),
        )
        for count, part in enumerate(parts, 1)
    ]
