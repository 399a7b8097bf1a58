"""Faults that the monitors of nodes report: recorded once, reported once a cause, limited in number, and remembered for policies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, Final, Generic, TypeVar

from holdfast.control.agents.events import NodeCounterIncreases, NodeFaultSeen
from holdfast.detectors import all_kinds
from holdfast.detectors.catalogue import Certainty, Fault
from holdfast.history import models
from holdfast.log import note
from holdfast.policies.recovery.case import PastFault

log = logging.getLogger("holdfast.control")

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

REPEATED: Final = 900.0
"""Seconds within which the same fault of the same device is not reported again; every one is recorded."""
REMEMBERED: Final = 50_000
"""Newest faults that are remembered, so that none is recorded twice."""
MAX_PAST: Final = 5000
"""Past faults that are remembered for policies."""
MAX_COUNTED: Final = 500
"""Newest past faults that one decision gets: far more than any threshold."""
ROWS: Final = 600
"""Rows a minute that a node may cause in the long run: its faults, checkpoints and events."""
ROWS_AT_ONCE: Final = 20_000
"""Such rows at once: the event log that a controller reads when it reattaches may hold those of days."""
STEPS: Final = 120_000
"""Steps a minute: one every half millisecond."""
STEPS_AT_ONCE: Final = 2_500_000
"""As many as the two files of an agent's event log can hold."""
REPORT_INTERVAL: Final = 3600.0
"""Seconds after which it is reported again that a node exceeds its budget."""


class BoundedDict(dict[Key, Value], Generic[Key, Value]):
    """A mapping that keeps only the newest keys."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._size:
            del self[next(iter(self))]


class NodeEventBudget:
    """How many rows each node may cause, at once and a minute: a hostile node must not fill a history that others share."""

    def __init__(self, what: str, per_minute: float, at_once: float, report: Callable[[str], None]) -> None:
        """Count *what*, a plural noun; *report* gets the message that a node exceeds its budget."""
        self._what, self._rate, self._most, self._report = what, per_minute / 60.0, at_once, report
        self._remaining: dict[str, tuple[float, float]] = {}
        """Node to its remaining budget, and when that was counted (monotonic)."""
        self._reported: dict[str, float] = {}

    def allows(self, node: str, number: int = 1) -> bool:
        """Take *number* from the budget of *node*; return False, and take nothing, where less remains."""
        now = time.monotonic()
        remaining, at = self._remaining.get(node, (self._most, now))
        remaining = min(self._most, remaining + (now - at) * self._rate)
        self._remaining[node] = (remaining - number if remaining >= number else remaining), now
        if remaining >= number:
            return True
        if now - self._reported.get(node, -REPORT_INTERVAL) >= REPORT_INTERVAL:
            self._reported[node] = now
            note(log, "event-budget.exceeded", level=logging.WARNING, node=node, what=self._what, per_minute=self._rate * 60)
            self._report(
                f"the agent of {node} sends more {self._what} than are recorded of one node ({self._rate * 60:,.0f} a minute): "
                "the rest is dropped. Check that node, or take it out of service"
            )
        return False


class NodeFaultDedup:
    """Accepts each fault once: a controller that reattaches receives again what the last one has recorded."""

    def __init__(self) -> None:
        self._known = BoundedDict[tuple[str, str | None, float, str], None](REMEMBERED)
        """Kind, node, time and part of each: a sample reports all that it found at one time."""

    def take(self, node: str, event: NodeFaultSeen) -> Fault | None:
        """Return the fault in *event*; None where it is recorded, or of a kind that is not in this catalogue."""
        name, at = event.kind, event.seen_at
        if name not in all_kinds.CATALOGUE or (name, node, at, event.part) in self._known:
            return None
        self._known[name, node, at, event.part] = None
        return Fault(
            kind=name,
            at=at,
            node=node,
            quote=event.quote,
            signature=f"{name} {event.part}",
            source=event.source,
            device=event.part,
            idle=event.idle and not event.on,
            contradicted=event.contradicted,
            supported=event.supported,
        )

    def remember(self, rows: Iterable[models.FaultRecord]) -> None:
        """Note the recorded faults."""
        for row in rows:
            self._known[row.kind, row.node, row.at, str((row.evidence or {}).get("device") or "")] = None


class Announcements:
    """Which faults of nodes were reported to people: one line a cause, as the nodes of one machine share its faults."""

    def __init__(self) -> None:
        self._last = BoundedDict[tuple[str, str, str, Certainty], float](REMEMBERED)

    def is_new(self, fault: Fault, machine: str, now: float) -> bool:
        """Return whether *fault* of *machine* is to be reported at *now* (monotonic), and note that it is.

        What says more is reported, although what says less was reported before: a line that a measurement contradicts, a line, a proof.
        """
        key = (fault.kind, fault.device, machine)
        if any(now - self._last.get((*key, more), -REPEATED) < REPEATED for more in Certainty if more >= fault.certainty):
            return False
        self._last[*key, fault.certainty] = now
        return True


def machine_of(node: str, cluster_kind: str) -> str:
    """Return the machine of *node*: empty on a local cluster, whose nodes are folders of one machine."""
    return "" if cluster_kind == "local" else node


def with_counter_increases(facts: dict[str, Any] | None, node: str, event: NodeCounterIncreases) -> dict[str, Any]:
    """Return an incident's *facts* with the error counters that increased on *node* while its generation ran, by device."""
    facts = facts or {}
    own = {"seconds": event.seconds, "counters": event.counter_increases}
    return {**facts, "counter_increases": {**facts.get("counter_increases", {}), node: own}}


class FaultHistory:
    """Past faults of nodes, by their row in the history; in memory, as a recovery cannot wait for a database."""

    def __init__(self) -> None:
        self._known: dict[str, PastFault] = {}

    def remember(self, rows: Iterable[models.FaultRecord]) -> None:
        """Add *rows*, oldest first; a known one is updated."""
        for row in rows:
            if row.node:
                device = str((row.evidence or {}).get("device") or "")
                self._known[row.id] = PastFault(
                    kind=row.kind, at=row.at, node=row.node, device=device, incident=row.incident_id or "", root=row.root
                )
        while len(self._known) > MAX_PAST:
            del self._known[next(iter(self._known))]

    def of(self, kinds: Collection[str], *, but: Collection[str], incident: str) -> tuple[PastFault, ...]:
        """Return the faults of *kinds*, without the rows in *but* and without those of *incident*."""
        found = [
            one for row, one in self._known.items() if one.kind in kinds and row not in but and not (incident and one.incident == incident)
        ]
        return tuple(sorted(found, key=lambda one: one.at)[-MAX_COUNTED:])
