"""The events that agents have sent and the controller has not handled yet."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Final

from holdfast.protocol import Message

DEFERRABLE: Final = frozenset({"heartbeats"})
"""Events that arrive by the thousand each second: they wake nobody, and are handled in their turn with the next poll."""
MAX_BYTES: Final = 128 * 2**20
"""Bytes of one node that may wait here: an agent's event log, replayed to a controller that reattaches, has half of that."""

Item = tuple[str, Message]
"""A node's name and an event of its agent."""


class EventQueue:
    """A queue in the order of arrival, whose reader sleeps while only deferrable events arrive."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._urgent = 0
        self._changed = threading.Condition()
        self._bytes: dict[str, int] = {}

    def has_room(self, node: str, size: int = 0) -> bool:
        """Return whether *size* more bytes of *node* may wait here, and count them; without *size*, whether half of the room is free."""
        with self._changed:
            waiting = self._bytes.get(node, 0)
            if not size:
                return waiting <= MAX_BYTES / 2
            if waiting + size > MAX_BYTES:
                return False
            self._bytes[node] = waiting + size
            return True

    def put(self, item: Item) -> None:
        """Add an event."""
        with self._changed:
            self._items.append(item)
            if item[1].get("event") not in DEFERRABLE:
                self._urgent += 1
                self._changed.notify()

    def drain(self, seconds: float) -> deque[Item]:
        """Return all events as soon as one of them is urgent, or after *seconds*."""
        with self._changed:
            self._changed.wait_for(lambda: self._urgent, seconds)
            items, self._items, self._urgent = self._items, deque(), 0
            self._bytes.clear()
            return items

    def get(self, timeout: float) -> Item:
        """Return the oldest event, waiting up to *timeout* seconds for one; raise ``queue.Empty`` when there is none."""
        end = time.monotonic() + timeout
        with self._changed:
            while not self._items:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    raise queue.Empty
                self._changed.wait(min(remaining, 0.05))  # deferrable events do not notify
            item = self._items.popleft()
            self._urgent -= item[1].get("event") not in DEFERRABLE
            return item
