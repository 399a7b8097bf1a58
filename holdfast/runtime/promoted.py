"""A standby that runs its script again from the top, as the rank that it has been given: in a process where all is warm.

Standard library only, so that the starter of a worker can use it without torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.wire import Message

_orders: list[Message] = []


class Again(BaseException):
    """Leave the script, whatever it is doing, and run it again with *environment*; *orders* are still to be carried out then."""

    def __init__(self, environment: Mapping[str, str], orders: list[Message]) -> None:
        super().__init__("this standby runs its script again, as the rank it was given")
        self.environment, self.orders = dict(environment), orders


def keep_orders(orders: list[Message]) -> None:
    """Keep orders for the next run of the script."""
    _orders.extend(orders)


def pop_orders() -> list[Message]:
    """Return the orders that were kept, once."""
    found = list(_orders)
    _orders.clear()
    return found
