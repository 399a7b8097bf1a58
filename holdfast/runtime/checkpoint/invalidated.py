"""States that nobody may go on from, though they are whole: the flow has found that what was trained from some step on is spoiled.

Such a state is known by its step and by the generation that made it, so that the same step, done again later, counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

VARIABLE: Final = "HOLDFAST_INVALIDATED"
SKIP: Final = "HOLDFAST_SKIP_STEPS"


@dataclass(frozen=True, slots=True)
class WrittenOff:
    """What is spoiled."""

    ranges: tuple[tuple[int, int], ...] = ()
    """From so many steps on, of generations before that one."""
    skip: frozenset[int] = frozenset()
    """Steps that are done with later batches than theirs."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return what the flow says: ``STEP:GENERATION,...``, and the steps to be skipped."""
        pairs = (one.split(":") for one in environment.get(VARIABLE, "").split(",") if one)
        skip = (int(one) for one in environment.get(SKIP, "").split(",") if one)
        return cls(tuple((int(step), int(number)) for step, number in pairs), frozenset(skip))

    def covers(self, step: int, generation: int) -> bool:
        """Tell whether the state after *step* steps that *generation* made is spoiled."""
        return any(step >= first and generation < number for first, number in self.ranges)

    def passed_over(self, step: int) -> int:
        """Return how many steps' batches are passed over before *step*: those of all steps in a row to be skipped, at the first."""
        if step - 1 in self.skip:
            return 0
        end = step
        while end in self.skip:
            end += 1
        return end - step


NOTHING: Final = WrittenOff()
