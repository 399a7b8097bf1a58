"""What the lookout tells, and what it keeps to itself because it told it already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from detectors.findings import FaultFinding
from holdfast.protocol import Message

QUIET: Final = 60.0
"""Seconds for which the same fault of the same part is not told again: a driver may log an error a thousand times in one."""
MOST_LINES: Final = 100
"""Lines of logs that are judged within a second; a log that is flooded says the same over and over, and judging has its price."""


class Deduplicator:
    """Says each fault once: a sighting by its kind and part."""

    def __init__(self, node: str, say: Callable[[Message], None]) -> None:
        self._node, self._say = node, say
        self._told: dict[tuple[str, str], float] = {}
        self._present: frozenset[tuple[str, str]] = frozenset()

    def happened(self, seen: FaultFinding, source: str, at: float, now: float) -> bool:
        """Tell something that happened (*at*, wall clock) unless it was told a moment ago; say whether it was told. *now* is monotonic."""
        key = (seen.kind, seen.part)
        again = key in self._told and now - self._told[key] < QUIET
        self._told[key] = now
        if not again and key not in self._present:
            self._tell(seen, source, at)
        return not again

    def looked(self, found: Iterable[tuple[str, FaultFinding]], at: float, now: float) -> None:
        """Tell what a look found, each with its source, that the look before had not, and that nobody else told a moment ago."""
        seen = {(one.kind, one.part): (source, one) for source, one in found}
        for key in [key for key in seen if key not in self._present]:
            if not (key in self._told and now - self._told[key] < QUIET):
                source, one = seen[key]
                self._tell(one, source, at)
            self._told[key] = now
        self._present = frozenset(seen)
        self._told = {key: when for key, when in self._told.items() if now - when < QUIET}

    def _tell(self, seen: FaultFinding, source: str, at: float) -> None:
        self._say({"fault": seen.kind, "part": seen.part, "quote": seen.quote, "source": f"{source} on {self._node}", "at": at})


class EventBudget:
    """How many lines may still be judged."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST_LINES)
        self.passed_over = 0
        """Lines that were not judged, in all."""

    def allows(self, now: float) -> bool:
        """Take one line's worth; False when there is none left in this second."""
        if len(self._times) == MOST_LINES and now - self._times[0] < 1.0:
            self.passed_over += 1
            return False
        self._times.append(now)
        return True
