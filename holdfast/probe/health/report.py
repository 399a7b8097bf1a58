"""The health of a cluster's nodes as values for a user's own flow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from holdfast.probe.health.checkup import Checkup
from policies.node_health import HealthAssessment, NodeHealthState

Health = Literal["healthy", "degraded", "unhealthy", "unreachable", "unknown"]
NAMES: Final[Mapping[str, Health]] = {
    NodeHealthState.OK: "healthy",
    NodeHealthState.DEGRADED: "degraded",
    NodeHealthState.UNHEALTHY: "unhealthy",
    NodeHealthState.UNREACHABLE: "unreachable",
    NodeHealthState.UNKNOWN: "unknown",
}


class NodeHealth(BaseModel):
    """One node, as it looked from outside."""

    model_config = ConfigDict(frozen=True)

    node: str
    health: Health
    """`degraded`: it works, and shows a fault worth watching. `unknown`: it could not be examined, for reasons that are not its own."""
    reasons: tuple[str, ...] = ()
    """What was found, the most serious first; empty for a healthy node."""

    @property
    def can_train(self) -> bool:
        """Tell whether it is healthy, or only degraded."""
        return self.health in {"healthy", "degraded"}

    def __str__(self) -> str:
        return f"{self.node} {self.health}" + (f" ({'; '.join(self.reasons[:2])})" if self.reasons else "")


class ClusterHealth(BaseModel):
    """All nodes of a cluster, as they looked from outside."""

    model_config = ConfigDict(frozen=True)

    cluster: str
    nodes: tuple[NodeHealth, ...]
    """In the cluster's order."""
    summary: str
    """The result in one sentence."""

    def of(self, *healths: Health) -> list[str]:
        """Return the names of the nodes that have one of these *healths*."""
        return [one.node for one in self.nodes if one.health in healths]

    @property
    def can_train(self) -> list[str]:
        """Return the names of the nodes that are healthy or only degraded."""
        return [one.node for one in self.nodes if one.can_train]


def node_health(found: HealthAssessment) -> NodeHealth:
    """Return what was found of a node."""
    return NodeHealth(node=found.node, health=NAMES.get(found.status, "unknown"), reasons=found.evidence)


def cluster_health(checkup: Checkup) -> ClusterHealth:
    """Return the result of the newest sweep of *checkup*."""
    nodes = tuple(node_health(one) for one in checkup.verdicts.values())
    counted = [(name, sum(one.health == name for one in nodes)) for name in NAMES.values()]
    words = ", ".join(f"{count} {name}" for name, count in counted if count)
    return ClusterHealth(cluster=checkup.cluster, nodes=nodes, summary=f"cluster '{checkup.cluster}': {words or 'no nodes'}")
