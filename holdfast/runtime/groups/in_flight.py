"""How far a rank is in one group: what it has begun there and what has not ended. A few plain writes an operation, read when asked for.

Members of a group count its collectives alike, so that the same number is the same operation on all of them; what passes between two
ranks is counted by its way (``send>3``, ``recv<3``) and compared with the other end's.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

from torch import Tensor

COLLECTIVES: Final = ""
"""The way of operations that all members take part in."""
MOST: Final = 64
"""Operations in work that are remembered; a script that never waits for what it sends would fill the memory else."""


class OperationMark(NamedTuple):
    """An operation that was begun."""

    way: str
    number: int
    """The how manieth of its way on the present connections, from 1."""
    name: str
    size: int
    """Elements of its first tensor."""
    kind: Any
    """Their type; None where it has no tensor."""
    since: float
    """When it was begun (`time.perf_counter`)."""


class InFlightOperations:
    """The operations of one group on its present connections."""

    __slots__ = ("counts", "pending")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Operations begun, by their way."""
        self.pending: dict[tuple[str, int], OperationMark] = {}
        """Those that have not ended as far as anybody here has seen, oldest first."""

    def enter(self, name: str, tensors: list[Tensor]) -> OperationMark:
        """Note that an operation begins."""
        way = name if name[4:5] in (">", "<") else COLLECTIVES
        number = self.counts[way] = self.counts.get(way, 0) + 1
        first = tensors[0] if tensors else None
        mark = OperationMark(
            way, number, name, 0 if first is None else first.numel(), None if first is None else first.dtype, time.perf_counter()
        )
        if len(self.pending) >= MOST:
            self.pending.pop(next(iter(self.pending), (way, 0)), None)
        self.pending[way, number] = mark
        return mark

    def leave(self, mark: OperationMark) -> None:
        """Note that it has ended; callable from any thread."""
        self.pending.pop((mark.way, mark.number), None)

    def forget(self) -> None:
        """Begin anew, with other connections."""
        self.counts, self.pending = {}, {}
