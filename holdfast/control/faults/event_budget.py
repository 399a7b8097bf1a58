"""How much one node may have put on record and kept in memory: a node in the wrong hands must not fill a history that others share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from holdfast.log import note

log = logging.getLogger("holdfast.control")

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

ROWS: Final = 600
"""Rows a minute that a node may have written in the long run: faults of it, checkpoints, remarks."""
ROWS_AT_ONCE: Final = 20_000
"""Such rows of which no flow has heard yet: a journal that is read by a flow which adopts the job may hold those of days."""
STEPS: Final = 120_000
"""Steps a minute: one every half millisecond."""
STEPS_AT_ONCE: Final = 2_500_000
"""As many as the two files of an agent's journal can hold."""
TOLD_AGAIN: Final = 3600.0
"""Seconds after which it is told again that a node's budget is spent."""


class NodeEventBudget:
    """What each node may have written: so much at once, and so much a minute after that."""

    def __init__(self, what: str, per_minute: float, at_once: float, tell: Callable[[str], None]) -> None:
        """Count *what*, in the plural; *tell* learns, in words, whose budget is spent."""
        self._what, self._rate, self._most, self._tell = what, per_minute / 60.0, at_once, tell
        self._left: dict[str, tuple[float, float]] = {}
        """Node to what it had left, and when that was counted (monotonic)."""
        self._told: dict[str, float] = {}

    def allows(self, node: str, number: int = 1) -> bool:
        """Take *number* from what *node* has left; False, and nothing taken, where that is not so much."""
        now = time.monotonic()
        left, at = self._left.get(node, (self._most, now))
        left = min(self._most, left + (now - at) * self._rate)
        self._left[node] = (left - number if left >= number else left), now
        if left >= number:
            return True
        if now - self._told.get(node, -TOLD_AGAIN) >= TOLD_AGAIN:
            self._told[node] = now
            note(log, "budget.spent", level=logging.WARNING, node=node, what=self._what, per_minute=self._rate * 60)
            self._tell(
                f"the agent of {node} tells more {self._what} than are put on record of one node ({self._rate * 60:,.0f} a minute): "
                "the rest is left out. Look at that node, or take it out of service"
            )
        return False


class BoundedDict(dict[Key, Value], Generic[Key, Value]):
    """A mapping that keeps the newest keys alone."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
