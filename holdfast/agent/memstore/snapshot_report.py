"""What a worker says of its snapshots in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from holdfast.agent import schema
from holdfast.protocol import Message

TAKES: Final[Mapping[str, Callable[[Message, str], object]]] = {
    "step": schema.whole,
    "at": schema.seconds,
    "every": schema.whole,
    "size": schema.whole,
    "taken": schema.whole,
    "given_up": schema.whole,
    "copied": schema.seconds,
    "overlapped": schema.seconds,
    "paused": schema.seconds,
    "prepared": schema.seconds,
    "slowed": schema.seconds,
    "trained": schema.seconds,
    "why": schema.text,
}
"""`holdfast.runtime.snapshots.reports` has the meanings."""


def said(message: Message) -> Message:
    """Return what goes with a beat; raise `BadField` for what a flow would stumble over."""
    told = schema.maybe(schema.mapping, message, "snapshot") or {}
    return {name: take(told, name) for name, take in TAKES.items() if told.get(name) is not None}
