"""What a worker says of its snapshots in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from holdfast.agent import fields
from holdfast.wire import Message

TAKES: Final[Mapping[str, Callable[[Message, str], object]]] = {
    "step": fields.whole,
    "at": fields.seconds,
    "every": fields.whole,
    "size": fields.whole,
    "taken": fields.whole,
    "given_up": fields.whole,
    "copied": fields.seconds,
    "hidden": fields.seconds,
    "paused": fields.seconds,
    "prepared": fields.seconds,
    "slowed": fields.seconds,
    "trained": fields.seconds,
    "why": fields.text,
}
"""`holdfast.runtime.snapshots.ledger` has the meanings."""


def said(message: Message) -> Message:
    """Return what goes with a beat; raise `BadField` for what a flow would stumble over."""
    told = fields.maybe(fields.mapping, message, "snapshot") or {}
    return {name: take(told, name) for name, take in TAKES.items() if told.get(name) is not None}
