"""A standby whose script runs again from the top: for another role, or, in its successor, as the rank that it has been given.

Standard library only, so that the starter of a worker can use it without torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from holdfast.protocol import Message

_lock = threading.Lock()
_orders: list[Message] = []
_taker: list[Callable[[Message], None]] = []


class RestartScript(BaseException):
    """Leave the script, whatever it is doing, and run it again with *environment*."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__("this standby runs its script again, as the rank it was given")
        self.environment = dict(environment)


def begin() -> None:
    """Let orders wait from now on until the script has come far enough again to take them."""
    with _lock:
        _taker.clear()


def keep(order: Message) -> None:
    """Keep an order that came while the script runs again, or hand it on when it has come far enough."""
    with _lock:
        if not _taker:
            _orders.append(order)
            return
        (taker,) = _taker
    taker(order)


def kept() -> list[Message]:
    """Take the orders that were kept."""
    with _lock:
        found = list(_orders)
        _orders.clear()
    return found


def forward_to(taker: Callable[[Message], None]) -> None:
    """Give *taker* the orders that were kept, and those that still come."""
    with _lock:
        found = list(_orders)
        _orders.clear()
        _taker[:] = [taker]
    for order in found:
        taker(order)
