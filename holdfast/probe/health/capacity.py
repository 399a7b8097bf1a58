"""Find the nodes of a cluster that a job could start on now, and wait until there are enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from holdfast.cluster import NodeBackend, NodeView, names_of, open_cluster
from holdfast.errors import AllocationRequired, CapacityTimeout, NotEnoughNodes
from holdfast.history import History, Job, cordons
from holdfast.history.cordons import CordonTable
from holdfast.plurals import plural
from holdfast.policies.nodes.cordons import Node, describe
from holdfast.policies.nodes.maintenance import PlannedOutage
from holdfast.policies.nodes.maintenance import planned_outage as maintenance_of
from holdfast.policies.nodes.node_health import HealthAssessment
from holdfast.probe.health.checkup import Checkup, node_health
from holdfast.probe.sweep import DEADLINE, open_sweeper
from holdfast.report.text.wording import duration, moment
from holdfast.spec import Cluster


class Capacity(BaseModel):
    """What a cluster could give to a job at one moment."""

    model_config = ConfigDict(frozen=True)

    cluster: str
    free: tuple[str, ...]
    """Nodes that are healthy or degraded, hold no job, and are in service; in the cluster's order."""
    unavailable: dict[str, str]
    """Every other node, and why."""
    waited_seconds: float = 0.0

    @property
    def reasons(self) -> str:
        """Return why the other nodes cannot be used."""
        return "; ".join(f"{node}: {why}" for node, why in self.unavailable.items())


@dataclass(slots=True)
class CapacityCheck:
    """Examines one cluster again and again, over connections that stay open."""

    cluster: Cluster
    labels: Mapping[str, str]
    history: History
    source: NodeBackend
    checkup: Checkup
    _names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        names = names_of(self.cluster)
        labelled = set(self.cluster.labelled(self.labels)) if self.labels else set(names)
        self._names = [name for name in names if name in labelled]

    @property
    def size(self) -> int:
        """Return how many nodes could ever be free."""
        return len(self._names)

    def now(self, deadline: float = DEADLINE) -> Capacity:
        """Examine every node once; one attempt to reach a node takes *deadline* seconds at most."""
        self.checkup.sweep(deadline)
        self.checkup.classify()
        self.checkup.record()
        views = {view.name: view for view in self.source.survey(deadline)}
        table = CordonTable(cluster=self.cluster.name, names=names_of(self.cluster), rules=self.cluster.quarantine.rules)
        now = time.time()
        recorded = cordons.nodes(self.history, table, now=now)
        with self.history.session() as session:
            jobs = {name: session.get(Job, views[name].job) for name in self._names if views[name].job}
        found = {
            name: obstacle(
                views[name],
                job.name if (job := jobs.get(name)) is not None else views[name].job or "",
                recorded.get(name, Node(name=name)),
                maintenance_of(self.cluster.windows, name, now),
                self.checkup.assessments[name],
            )
            for name in self._names
        }
        return Capacity(
            cluster=self.cluster.name,
            free=tuple(name for name, why in found.items() if not why),
            unavailable={name: why for name, why in found.items() if why},
        )


def obstacle(view: NodeView, job: str, node: Node, maintenance: PlannedOutage | None, found: HealthAssessment) -> str:
    """Return why a node cannot be given to a job now; empty when it can."""
    if job:
        return f"job '{job}' runs on it"
    if node.is_isolated:
        return describe(node)
    if maintenance is not None:
        return f"{maintenance.reason} from {moment(maintenance.start)} to {moment(maintenance.ends)}"
    health = node_health(found)
    if not health.can_train:
        return f"{health.health}: {'; '.join(health.reasons[:2]) or 'no reason is known'}"
    return "" if view.status in {"idle", "up"} else f"its agent cannot be reached: {view.why or 'the node is unreachable'}"


@contextmanager
def open_capacity_check(cluster: Cluster, labels: Mapping[str, str] | None = None) -> Iterator[CapacityCheck]:
    """Yield a check of the capacity of *cluster*; with *labels*, only of the nodes that have them all."""
    if cluster.kind == "slurm":
        raise AllocationRequired("waiting for free nodes", cluster.name)
    with closing(History.open()) as history, closing(open_cluster(cluster)) as source, open_sweeper(cluster) as sweeper:
        yield CapacityCheck(cluster, labels or {}, history, source, Checkup(cluster.name, sweeper, history))


def wait_for(
    check: CapacityCheck, nodes: int, *, timeout_seconds: float, poll_seconds: float, report: Callable[[str], None] = lambda _: None
) -> Capacity:
    """Return the capacity once at least *nodes* nodes are free; raise `CapacityTimeout` when that takes too long.

    *report* gets a line whenever the answer changes. Raise `NotEnoughNodes` at once when the cluster has fewer nodes altogether.
    """
    if nodes > check.size:
        have = plural(check.size, "node has", "nodes have")
        labels = f"only {have} the labels {dict(check.labels)}" if check.labels else f"it has {check.size} in all"
        raise NotEnoughNodes(nodes, check.size, check.cluster.name, labels)
    begun, reported = time.monotonic(), ""
    while True:
        found = check.now()
        waited = time.monotonic() - begun
        if len(found.free) >= nodes:
            return found.model_copy(update={"waited_seconds": waited})
        if waited >= timeout_seconds:
            raise CapacityTimeout(check.cluster.name, nodes, len(found.free), duration(timeout_seconds), found.reasons)
        text = f"cluster '{check.cluster.name}': {len(found.free)} of {nodes} nodes are free; waiting: {found.reasons}"
        if text != reported:
            report(text)
            reported = text
        time.sleep(min(poll_seconds, max(0.0, timeout_seconds - waited)))
