"""What the agents' lookouts tell of their nodes: faults, and what grew there during an incident."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from detectors import all_kinds
from detectors.catalogue import Fault
from holdfast.control.agents.events import NodeCounterIncreases, NodeFaultSeen
from holdfast.control.faults.event_budget import BoundedDict

REPEATED: Final = 900.0
"""Seconds within which the same fault of the same part of a machine is not announced again; every one is on record."""


REMEMBERED: Final = 50_000
"""Faults that are remembered, the newest, so that none is put on record twice."""


class NodeFaultDedup:
    """Takes in the lookouts' events. Each is believed once: a flow that adopts a job hears again what the one before has on record."""

    def __init__(self) -> None:
        self._known = BoundedDict[tuple[str, str | None, float], None](REMEMBERED)

    def take(self, node: str, event: NodeFaultSeen) -> Fault | None:
        """Return the fault that *event* tells of; None where it is on record, or of a kind that this catalogue does not have."""
        name, at = event.kind, event.seen_at
        if name not in all_kinds.CATALOGUE or (name, node, at) in self._known:
            return None
        self._known[name, node, at] = None
        return Fault(
            kind=name, at=at, node=node, quote=event.quote, signature=f"{name} {event.part}", source=event.source, device=event.part
        )

    def remember(self, faults: Iterable[tuple[str, str | None, float]]) -> None:
        """Take what is on record: kind, node and time of each fault."""
        for fault in faults:
            self._known[fault] = None


class Announcements:
    """Which faults of nodes people have been told of. One line a cause: the nodes of one machine have its faults in common."""

    def __init__(self) -> None:
        self._last = BoundedDict[tuple[str, str, str], float](REMEMBERED)

    def is_new(self, fault: Fault, machine: str, now: float) -> bool:
        """Tell whether *fault* of *machine* is to be announced at *now* (monotonic), and take it that it is."""
        key = (fault.kind, fault.device, machine)
        if key in self._last and now - self._last[key] < REPEATED:
            return False
        self._last[key] = now
        return True


def machine_of(node: str, cluster_kind: str) -> str:
    """Return the name of the machine that *node* is on: the nodes of a local cluster are folders of one, which needs no name."""
    return "" if cluster_kind == "local" else node


def with_counter_increases(facts: dict[str, Any] | None, node: str, event: NodeCounterIncreases) -> dict[str, Any]:
    """Return an incident's *facts* with what grew on *node* while its generation ran: counters of errors, by place."""
    facts = facts or {}
    return {
        **facts,
        "counter_increases": {**facts.get("counter_increases", {}), node: {"seconds": event.seconds, "counters": event.counter_increases}},
    }
