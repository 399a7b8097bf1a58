"""Divide the batch of a step among the copies of the model: the batch stays the same, however many copies there are.

The batch is cut the same way on all copies. With fewer copies than usual each computes more, in several micro-batches, so that none is
larger than with all copies. The weight of a micro-batch makes the mean over the copies, which is what DDP computes of gradients, the mean
over the samples of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """How a step's batch is divided, for one copy of the model."""

    place: int
    """The number of this copy, counted from 0."""
    copies: int
    max_samples: int | None = None
    """Maximum samples of a micro-batch; None: no limit."""
    equal_size: bool = False
    """Every micro-batch has `max_samples` samples: for models built for one size, like a pipeline."""

    def parts(self, samples: int) -> list[range]:
        """Return which of a batch's *samples* this copy computes, by micro-batch: all copies have the same number of micro-batches.

        With fewer samples than micro-batches some are empty.
        """
        if self.equal_size and self.max_samples:
            units = [range(first, min(first + self.max_samples, samples)) for first in range(0, samples, self.max_samples)]
            mine = units[len(units) * self.place // self.copies : len(units) * (self.place + 1) // self.copies]
            return mine + [range(0)] * (-(-len(units) // self.copies) - len(mine))
        largest = -(-samples // self.copies)
        count = max(1, -(-largest // self.max_samples)) if self.max_samples else 1
        first, end = samples * self.place // self.copies, samples * (self.place + 1) // self.copies
        cuts = [first + (end - first) * part // count for part in range(count + 1)]
        return [range(begin, after) for begin, after in pairwise(cuts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShard:
    """One micro-batch of one copy's share of a step's batch."""

    samples: int
    of: int
    """Samples of the step's complete batch."""
    copies: int
    last: bool
    """It is the last micro-batch of the step for this copy."""

    @property
    def weight(self) -> float:
        """Return the factor of the micro-batch's mean loss: 1 where all copies compute equally many samples at once."""
        return self.samples * self.copies / self.of


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A part of a step's batch that one rank computes at once. `Session.micro_batches` yields it."""

    batch: Any
    """The samples, as the ``collate_fn`` of the ``DataLoader`` returned them."""
    weight: float
    """Factor for the mean loss over these samples, to apply before ``backward()``; 1 with all ranks present and one micro-batch each."""
    last: bool
    """Whether this is the last micro-batch of the step on this rank. Its backward pass averages gradients over the ranks."""


def split(batch: Sequence[Any], how: BatchSplit) -> list[tuple[list[Any], BatchShard]]:
    """Return this copy's micro-batches of a step's *batch* of samples. An empty one gets samples of others with a weight of 0."""
    parts = how.parts(len(batch))
    others = list(batch[: how.max_samples if how.equal_size else 1])
    return [
        (
            [batch[number] for number in part] or others,
            BatchShard(samples=len(part), of=len(batch), copies=how.copies, last=count == len(parts)),
        )
        for count, part in enumerate(parts, 1)
    ]
