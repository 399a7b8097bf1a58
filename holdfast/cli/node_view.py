"""The nodes of a job as a watcher sees them: which ranks each one has, its condition, the spares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from holdfast.history import queries
from holdfast.history.health_samples import health_by_node
from holdfast.history.models import FaultRecord, Generation, Job, NodeStatusChange
from holdfast.history.store import History
from holdfast.plurals import named_ranks, plural
from holdfast.policies.nodes.node_health import HealthAssessment, NodeHealthState
from holdfast.report.text.wording import listing

SUSPECT: Final = frozenset({"suspect", "lost", "excluded"})
"""States of a node, as the job's controller records them, that are conditions to show."""
MAX_NAMES: Final = 4
"""Spare nodes that are named at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNode:
    """One node of a job."""

    name: str
    ranks: Sequence[int] = ()
    """Empty for a spare node."""
    hot_spares: int = 0
    """Hot spares that are ready there."""
    condition: str = ""
    """A state in one word, such as ``lost`` or ``unhealthy``; empty if nothing was recorded."""
    reason: str = ""
    is_bad: bool = False
    """Whether the condition, or the state of a rank, needs attention."""

    @property
    def role(self) -> str:
        """Return what it does in the job, as text."""
        return (named_ranks(self.ranks) or "spare") + (f", {plural(self.hot_spares, 'hot spare')}" if self.hot_spares else "")

    @property
    def state(self) -> str:
        """Return condition and reason, as text."""
        return ": ".join(part for part in (self.condition, self.reason) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNodes:
    """The nodes of one generation of a job."""

    members: Sequence[JobNode] = ()
    """Nodes with ranks."""
    spares: Sequence[JobNode] | None = None
    """Spare nodes; None: not reported yet."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Nodes that the job has lost or left, or that are out of service, and why."""

    @property
    def bad(self) -> list[JobNode]:
        """Return the nodes that need attention, those with ranks first."""
        return [one for one in (*self.members, *(self.spares or ())) if one.is_bad]

    @property
    def attention(self) -> list[tuple[int, str]]:
        """Return the nodes that need attention as text, those with the same condition together, each time with their number."""
        groups = dict[str, list[JobNode]]()
        for one in self.bad:
            groups.setdefault(one.state, []).append(one)
        found = list[tuple[int, str]]()
        for state, nodes in groups.items():
            held = named_ranks(rank for one in nodes for rank in one.ranks) or "spare"
            found.append((len(nodes), f"{listing((one.name for one in nodes), 3)} ({held}) {state}"))
        return found

    @property
    def hot_spares(self) -> int:
        """Return how many hot spares are ready."""
        return sum(one.hot_spares for one in (*self.members, *(self.spares or ())))

    @property
    def reserve(self) -> str:
        """Return spare nodes and hot spares as text; empty if they are not reported yet."""
        if self.spares is None:
            return ""
        where = [f"{one.name} ({one.hot_spares})" for one in (*self.members, *self.spares) if one.hot_spares]
        named = f" ({listing((one.name for one in self.spares), MAX_NAMES)})" if self.spares else ""
        hot = f"{plural(self.hot_spares, 'hot spare')} ready: {listing(where, MAX_NAMES)}" if where else "no hot spare ready"
        return f"{plural(len(self.spares), 'spare node') if self.spares else 'no spare node'}{named}, {hot}"

    def as_record(self) -> dict[str, Any]:
        """Return what is known of the nodes for programs."""
        known = [*self.members, *(self.spares or ())]
        conditions = {one.name: {"condition": one.condition, "reason": one.reason, "is_bad": one.is_bad} for one in known if one.condition}
        return {
            "conditions": conditions,
            "spare_nodes": None if self.spares is None else [one.name for one in self.spares],
            "hot_spares": None if self.spares is None else {one.name: one.hot_spares for one in known if one.hot_spares},
            "removed": dict(self.removed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecords:
    """What the history has of the nodes of one cluster."""

    statuses: Mapping[str, NodeStatusChange]
    """By node, as jobs recorded it last."""
    health: Mapping[str, HealthAssessment]
    """By node, as it was checked last."""

    @classmethod
    def of(cls, history: History, cluster: str) -> Self:
        """Read it."""
        return cls(statuses=queries.node_statuses(history, cluster), health=health_by_node(history, cluster))


def cluster_name(job: Job) -> str:
    """Return the name of the cluster of *job*."""
    return str(job.cluster.get("name"))


def nodes_of(records: NodeRecords, job: Job, generation: Generation | None, faults: Sequence[FaultRecord], now: float) -> JobNodes:
    """Return the condition of the nodes of *generation*; *faults* are those of the incident that is open."""
    if generation is None:
        return JobNodes()
    facts = generation.facts or {}
    recorded = _recorded(records, job)
    suspect = {node: one for node, one in recorded.items() if one[2]}
    probed = _probed(records, now)
    faulty = {node: (condition, _with_health(why, probed.get(node)), bad) for node, (condition, why, bad) in _faulty(faults).items()}
    conditions = {**recorded, **probed, **suspect, **faulty}
    hot = {str(node): int(number) for node, number in (facts.get("hot_spares") or {}).items()}

    def one(node: str, held: Sequence[int] = ()) -> JobNode:
        condition, reason, is_bad = conditions.get(node, ("", "", False))
        return JobNode(name=node, ranks=held, hot_spares=hot.get(node, 0), condition=condition, reason=reason, is_bad=is_bad)

    spares = facts.get("spare_nodes")  # recorded while no incident is open: since then one may have become a member
    kept = {*generation.ranks, *(spares or ())}
    gone = {node: one for node, one in conditions.items() if node not in kept and one[0] in {"lost", "excluded"}}
    isolated = {str(node): str(why) for node, why in (facts.get("isolated") or {}).items() if node not in kept}
    return JobNodes(
        members=[one(str(node), list(held)) for node, held in generation.ranks.items()],
        spares=None if spares is None else [one(str(node)) for node in spares if node not in generation.ranks],
        removed={node: f"{status}: {why}" for node, (status, why, _) in gone.items()} | isolated,
    )


def _with_health(why: str, probed: tuple[str, str, bool] | None) -> str:
    """Return *why* a node is in its condition, and what the last probe found where that is bad, too."""
    return f"{why}; {probed[0]}: {probed[1]}" if probed is not None and probed[2] else why


def _probed(records: NodeRecords, now: float) -> dict[str, tuple[str, str, bool]]:
    """Return condition, reason and whether it is bad, by node, as the last probe found it."""
    found = dict[str, tuple[str, str, bool]]()
    for node, health in records.health.items():
        if health.is_fresh(now):
            why = "" if health.status == NodeHealthState.HEALTHY else "; ".join(health.evidence[:2])
            found[node] = (str(health.status), why, health.is_bad)
    return found


def _recorded(records: NodeRecords, job: Job) -> dict[str, tuple[str, str, bool]]:
    """Return the same as the job's controller recorded it."""
    return {node: (row.status, row.reason, row.status in SUSPECT) for node, row in records.statuses.items() if row.job_id == job.id}


def _faulty(faults: Sequence[FaultRecord]) -> dict[str, tuple[str, str, bool]]:
    """Return the same of the nodes with *faults*."""
    of_node = dict[str, list[FaultRecord]]()
    for fault in faults:
        of_node.setdefault(fault.node or "", []).append(fault)
    of_node.pop("", None)
    found = dict[str, tuple[str, str, bool]]()
    for node, here in of_node.items():
        held = {one.rank for one in here if one.rank is not None}
        where = f" on {named_ranks(held)}" if held else ""
        found[node] = ("fault", ", ".join(dict.fromkeys(one.kind for one in here)) + where, True)
    return found
