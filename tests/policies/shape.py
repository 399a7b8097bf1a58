"""The shape of a table of moves, whatever its rows are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

State = TypeVar("State")
Event = TypeVar("Event")


def reached(table: Mapping[tuple[State, Event], State], state: State) -> set[State]:
    """Return every state that the moves of *table* can lead to from *state*."""
    seen, waiting = set[State](), [state]
    while waiting:
        here = waiting.pop()
        nexts = {after for (before, _), after in table.items() if before is here} - seen
        seen |= nexts
        waiting += nexts
    return seen
