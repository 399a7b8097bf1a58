"""Attempts to reach nodes that say nothing: each by a connection of its own, beside what the flow does, one at a time of each node."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any, Final

PATIENCE: Final = 5.0
"""Seconds for which an attempt that has begun is waited for."""


@dataclass(frozen=True, slots=True)
class ReconnectResult:
    """An attempt: when it began (monotonic), and whether the node answered."""

    begun: float
    answered: bool


class Reconnects:
    """The newest attempt at each node."""

    def __init__(self, hands: Executor, answers: Callable[[str], bool]) -> None:
        """Begin with none; *answers* tries a node by a new connection."""
        self._hands, self._answers = hands, answers
        self._newest: dict[str, ReconnectResult] = {}
        self._present: dict[str, Future[Any]] = {}

    def beside(self, node: str, act: Callable[[str], object]) -> None:
        """Do something about *node* beside what the flow does, unless something is done about it."""
        present = self._present.get(node)
        if present is None or present.done():
            self._present[node] = self._hands.submit(act, node)

    def see_out(self, node: str) -> None:
        """Wait for what has begun about *node*."""
        present = self._present.get(node)
        if present is not None:
            wait([present], timeout=PATIENCE)

    def go_on(self, node: str, present: Future[Any], begun: float) -> None:
        """Take an attempt for failed that nobody waits for any longer; it goes on."""
        self._present[node] = present
        self.take(node, begun, answered=False)

    def take(self, node: str, begun: float, *, answered: bool) -> None:
        """Remember an attempt that somebody else made."""
        self._newest[node] = ReconnectResult(begun, answered)

    def forget(self, node: str) -> None:
        """Forget about *node*, which was reached."""
        self._newest.pop(node, None)

    def knock(self, node: str) -> bool:
        """Tell whether *node* answers by a new connection, which the agent's channel takes up; remember it."""
        begun, answered = time.monotonic(), False
        try:
            answered = self._answers(node)
        finally:
            self.take(node, begun, answered=answered)
        return answered

    def failed(self, node: str, since: float = 0.0) -> bool:
        """Tell whether the newest attempt at *node* was in vain, and began after *since* (monotonic)."""
        newest = self._newest.get(node)
        return newest is not None and not newest.answered and newest.begun > since

    def answered_since(self, at: float) -> set[str]:
        """Return the nodes that have answered to an attempt that began after *at* (monotonic)."""
        return {node for node, one in list(self._newest.items()) if one.answered and one.begun > at}

    def forget_failures(self) -> None:
        """Forget all attempts that were in vain."""
        for node in [node for node, one in list(self._newest.items()) if not one.answered]:
            self._newest.pop(node, None)

    def newest(self, node: str, at: float) -> ReconnectResult:
        """Return the newest attempt at *node* if it began after *at* (monotonic), else a new one; one that has begun is waited for."""
        self.see_out(node)
        newest = self._newest.get(node)
        if newest is not None and newest.begun > at:
            return newest
        return ReconnectResult(time.monotonic(), self.knock(node))
