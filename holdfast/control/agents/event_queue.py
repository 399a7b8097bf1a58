"""What all agents have said and nobody has taken in yet."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Final

from holdfast.protocol import Message

PATIENT: Final = frozenset({"heartbeats"})
"""Events that come by the thousand each second and wake nobody: they are taken in with the next look, in their turn."""

MOST: Final = 128 * 2**20
"""Bytes of one node that wait to be taken in: an agent's journal, told anew to a flow that adopts the job, has half of that."""

Item = tuple[str, Message]
"""A node's name and an event of its agent."""


class EventQueue:
    """A queue in the order of arrival, whose reader sleeps through what is patient."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._urgent = 0
        self._changed = threading.Condition()
        self._bytes: dict[str, int] = {}

    def has_room(self, node: str, size: int = 0) -> bool:
        """Tell whether *size* more bytes of *node* may wait here, and count them; with none, whether a good deal of them may."""
        with self._changed:
            waiting = self._bytes.get(node, 0)
            if not size:
                return waiting <= MOST / 2
            if waiting + size > MOST:
                return False
            self._bytes[node] = waiting + size
            return True

    def put(self, item: Item) -> None:
        """Add what an agent said."""
        urgent = item[1].get("event") not in PATIENT
        with self._changed:
            self._items.append(item)
            if urgent:
                self._urgent += 1
                self._changed.notify()

    def drain(self, seconds: float) -> deque[Item]:
        """Return all there is, once something urgent is among it, or after so many *seconds* in any case."""
        with self._changed:
            self._changed.wait_for(lambda: self._urgent, seconds)
            items, self._items, self._urgent = self._items, deque(), 0
            self._bytes.clear()
            return items

    def get(self, timeout: float) -> Item:
        """Return the oldest item, waiting for one at most so long; raise ``queue.Empty`` when there is none."""
        until = time.monotonic() + timeout
        with self._changed:
            while not self._items:
                left = until - time.monotonic()
                if left <= 0:
                    raise queue.Empty
                self._changed.wait(min(left, 0.05))  # what is patient wakes nobody
            item = self._items.popleft()
            self._urgent -= item[1].get("event") not in PATIENT
            return item
