"""Pauses between two steps that are longer than a job's own steps explain: told of, measured, and no fault by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from detectors.evidence import HangLimits, Progress
from detectors.progress import pause_in, pause_in_words

if TYPE_CHECKING:
    from holdfast.control.state.generation import GenerationState

LONGER: Final = 1.5
"""A pause is told of once it is this many times as long as the longest before: an evaluation every hundred steps is told of once."""


class Pauses:
    """Watches a job for pauses from which it goes on by itself; what such a pause took, a later one may take."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Begin with no pause seen; *tell* is given what a person should know."""
        self._tell = tell
        self._generation = -1
        self._present = self._longest = 0.0
        self._told = False

    def poll(self, board: GenerationState, seen: Progress, limits: HangLimits) -> None:
        """Take in how far the ranks of *board* are; a pause that a recovery ended says nothing about the job."""
        if board.generation != self._generation:
            self._generation, self._present, self._told = board.generation, 0.0, False
        pause = pause_in(seen, limits)
        if pause < self._present:
            board.longest_pause = self._longest = max(self._longest, self._present)
            self._told = False
        self._present = pause
        if not self._told and pause > LONGER * self._longest:
            self._told = True
            self._tell(pause_in_words(seen, limits))
