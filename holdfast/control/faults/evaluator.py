"""What is seen against the present generation, at a cost that does not grow with the number of looks.

A piece of evidence is judged once. Whether the job stands still is a question about all its ranks: it is asked as often as it takes a tenth
of the time at most, which for a small job is with every look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from detectors.catalogue import Fault
from detectors.diagnosis import see
from detectors.evidence import HangLimits, Progress
from detectors.progress import STANDSTILLS, see_progress, without_grace
from holdfast.control.state.generation import GenerationState

REST: Final = 9.0
"""Times as long as a look at all ranks took, until the next one."""


class FaultEvaluator:
    """The faults of one generation, as far as they have been judged."""

    def __init__(self, board: GenerationState, known_until: Callable[[], float]) -> None:
        """Judge *board*; *known_until* says until when it is known what ranks do (wall clock)."""
        self._board, self._known_until = board, known_until
        self._judged = 0
        self._faults: list[Fault] = []
        self._progress: Progress | None = None
        self._still: list[Fault] = []
        self._stands = False
        self._due = 0.0

    def faults(self, limits: HangLimits, *, steps_expected: bool) -> list[Fault]:
        """Return everything that speaks against this generation now, agents' silence aside."""
        board, now = self._board, time.time()
        new, self._judged = board.evidence[self._judged :], len(board.evidence)
        self._faults += see(new, limits)
        self.progress(limits, steps_expected=steps_expected)
        overrun = [board.overrun] if board.overrun is not None else []
        return [*self._faults, *board.unusable, *see(board.stops(now), limits), *self._still, *see(overrun, limits)]

    def is_stalled(self, limits: HangLimits, *, steps_expected: bool) -> bool:
        """Tell whether no rank gets on, for longer than the job's own steps explain: that alone is no fault."""
        self.progress(limits, steps_expected=steps_expected)
        return self._stands

    def progress(self, limits: HangLimits, *, steps_expected: bool) -> Progress | None:
        """Return how far all ranks were at the newest look."""
        begun = time.monotonic()
        if begun >= self._due:
            self._look(time.time(), limits, steps_expected=steps_expected)
            if (self._still or self._stands) and (until := self._known_until()) < time.time():
                self._look(until, limits, steps_expected=steps_expected)  # nobody knows what ranks have done since
            ended = time.monotonic()
            self._due = ended + REST * (ended - begun)
        return self._progress

    def _look(self, at: float, limits: HangLimits, *, steps_expected: bool) -> None:
        self._progress = self._board.progress(at, steps_expected=steps_expected)
        soon = None if self._progress is None else see_progress(replace(self._progress, longest_pause=0.0), without_grace(limits))
        self._stands = soon is not None and soon.kind in STANDSTILLS
        self._still = see([self._progress], limits) if self._progress is not None and soon is not None else []
