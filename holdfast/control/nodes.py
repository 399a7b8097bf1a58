"""What the agents' lookouts tell of their nodes: faults, and what grew there during an incident."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from detectors import whole
from detectors.catalogue import Fault
from holdfast.wire import Message


class NodeNews:
    """Takes in the lookouts' events. Each is believed once: a flow that adopts a job hears again what the one before has on record."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str | None, float]] = set()

    def take(self, node: str, event: Message) -> Fault | None:
        """Return the fault that *event* tells of; None where it is on record, or of a kind that this catalogue does not have."""
        name, at = str(event["kind"]), float(event["seen_at"])
        if name not in whole.CATALOGUE or (name, node, at) in self._known:
            return None
        self._known.add((name, node, at))
        part, quote, source = (str(event[word]) for word in ("part", "quote", "source"))
        return Fault(kind=name, at=at, node=node, quote=quote, signature=f"{name} {part}", source=source, device=part)

    def remember(self, faults: Iterable[tuple[str, str | None, float]]) -> None:
        """Take what is on record: kind, node and time of each fault."""
        self._known.update(faults)


def with_growth(facts: dict[str, Any] | None, node: str, event: Message) -> dict[str, Any]:
    """Return an incident's *facts* with what grew on *node* while its generation ran: counters of errors, by place."""
    facts = facts or {}
    return {**facts, "grew": {**facts.get("grew", {}), node: {"seconds": event["seconds"], "counters": event["grew"]}}}
