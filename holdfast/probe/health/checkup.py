"""Check up on a cluster: sweep its nodes, assess each by the probe before, and keep the result. The same for flows and commands."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.health import unknown_signals
from holdfast.detectors.nodes.probe_result import NodeProbe
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.history import History
from holdfast.history.health_samples import KnownHealth, latest_health, save_sweep
from holdfast.plurals import plural
from holdfast.policies.nodes.node_health import HealthAssessment, HealthChange, NodeHealthState, assess_health, health_change
from holdfast.probe.registry import register
from holdfast.probe.sweep import DEADLINE, Sweeper, open_sweeper
from holdfast.spec import Cluster


@dataclass(slots=True)
class Checkup:
    """Sweep after sweep of one cluster, over the same connections."""

    cluster: str
    sweeper: Sweeper
    history: History
    probes: dict[str, NodeProbe] = field(default_factory=dict)
    """The result of the last sweep."""
    assessments: dict[str, HealthAssessment] = field(default_factory=dict)
    changes: list[HealthChange] = field(default_factory=list)
    at: float = 0.0
    """When the last sweep began (seconds since 1970)."""
    seconds: float = 0.0
    """How long it took."""
    _known: dict[str, KnownHealth] | None = None

    def sweep(self, deadline: float = DEADLINE, nodes: Collection[str] | None = None) -> Mapping[str, NodeProbe]:
        """Probe all nodes, or only *nodes*."""
        self.at, begun = time.time(), time.monotonic()
        self.probes = self.sweeper.sweep(deadline, nodes)
        self.seconds = time.monotonic() - begun
        return self.probes

    def classify(self) -> list[HealthChange]:
        """Assess each node, with what is known from the probe before; return what changed."""
        if self._known is None:
            self._known = latest_health(self.history, self.cluster)
        before = {node: self._known.get(node, KnownHealth()) for node in self.probes}
        self.assessments = {
            node: assess_health(probe, before[node].assessment, before[node].reading) for node, probe in self.probes.items()
        }
        self.changes = []
        for node, found in self.assessments.items():
            if (change := health_change(before[node].assessment, found)) is not None:
                self.changes.append(change)
            reading = self.probes[node].found
            self._known[node] = KnownHealth(assessment=found, reading=reading if isinstance(reading, NodeReading) else before[node].reading)
        return self.changes

    def record(self) -> None:
        """Write the result of the sweep into the history."""
        readings = {node: probe.found for node, probe in self.probes.items() if isinstance(probe.found, NodeReading)}
        save_sweep(self.history, self.cluster, self.assessments, self.changes, readings)

    def unseen(self, node: str) -> dict[str, str]:
        """Return what the last sweep could not read of *node*, and why."""
        found = self.probes[node].found
        if isinstance(found, Unknown):
            return {"node": found.why}
        return dict(unknown_signals(found)) if isinstance(found, NodeReading) else {}

    def counts(self) -> dict[str, int]:
        """Return the number of nodes by health, best first; a health that no node has is left out."""
        found = [one.status for one in self.assessments.values()]
        return {str(one): found.count(one) for one in NodeHealthState if one in found}

    def describe(self) -> str:
        """Return the last sweep in a sentence."""
        counted = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        return f"{plural(len(self.assessments), 'node')} in {self.seconds:.1f} s: {counted}"


@contextmanager
def open_checkup(cluster: Cluster) -> Iterator[Checkup]:
    """Yield a checkup of *cluster*, which tasks find by `registered`; raise `OperatorError` when there can be none."""
    with (
        closing(History.open()) as history,
        open_sweeper(cluster) as sweeper,
        register(cluster.name, Checkup(cluster.name, sweeper, history)) as checkup,
    ):
        yield checkup


class NodeHealth(BaseModel):
    """The health of one node from outside, for a user's own flow."""

    model_config = ConfigDict(frozen=True)

    node: str
    health: NodeHealthState
    """`degraded`: it works, with a fault worth watching. `unknown`: it could not be examined, for reasons that are not its own."""
    reasons: tuple[str, ...] = ()
    """What was found, the most serious first; empty for a healthy node."""

    @property
    def can_train(self) -> bool:
        """Return whether it is healthy, or only degraded."""
        return self.health in {"healthy", "degraded"}

    def __str__(self) -> str:
        return f"{self.node} {self.health}" + (f" ({'; '.join(self.reasons[:2])})" if self.reasons else "")


class ClusterHealth(BaseModel):
    """The health of all nodes of a cluster from outside, for a user's own flow."""

    model_config = ConfigDict(frozen=True)

    cluster: str
    nodes: tuple[NodeHealth, ...]
    """In the cluster's order."""
    summary: str
    """The result in one sentence."""

    def of(self, *healths: str) -> list[str]:
        """Return the names of the nodes that have one of these *healths*."""
        return [one.node for one in self.nodes if one.health in healths]

    @property
    def can_train(self) -> list[str]:
        """Return the names of the nodes that are healthy or only degraded."""
        return [one.node for one in self.nodes if one.can_train]


def node_health(found: HealthAssessment) -> NodeHealth:
    """Return the health of one node."""
    return NodeHealth(node=found.node, health=NodeHealthState(found.status), reasons=found.evidence)


def cluster_health(checkup: Checkup) -> ClusterHealth:
    """Return the result of the newest sweep of *checkup*."""
    nodes = tuple(node_health(one) for one in checkup.assessments.values())
    counted = [(name, sum(one.health == name for one in nodes)) for name in NodeHealthState]
    text = ", ".join(f"{count} {name}" for name, count in counted if count)
    return ClusterHealth(cluster=checkup.cluster, nodes=nodes, summary=f"cluster '{checkup.cluster}': {text or 'no nodes'}")
