"""How one worker's steps spent their time, in blocks of steps: few numbers for the beats, and one slow step does not move them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

BLOCK: Final = 8
"""Steps of a block. Blocks begin at the same steps on all ranks, so that they can be compared."""
LEAST: Final = 5
"""Steps that a block must have to say anything; those with a section in them are left out."""
TOLD: Final = 4
"""Newest blocks that a beat carries: each may be lost."""


class StepTimings:
    """The blocks of one worker in one generation."""

    def __init__(self) -> None:
        self._block = -1
        self._steps: list[Sequence[float]] = []
        self._done: deque[list[float]] = deque(maxlen=TOLD)

    def add(self, step: int, spent: Sequence[float]) -> None:
        """Take in how *step* spent its time, in seconds: own work, waits for other ranks, waits for data."""
        block = (step - 1) // BLOCK
        if block != self._block:
            self._block, self._steps = block, []
        self._steps.append(spent)
        if step % BLOCK == 0 and len(self._steps) >= LEAST:
            self._done.append([block, *(round(median(one), 6) for one in zip(*self._steps, strict=True))])

    def told(self) -> list[list[float]]:
        """Return the newest blocks: number, and the medians of a step's own work, waits for other ranks, and waits for data in seconds."""
        return list(self._done)
