"""The node-repair flow: run a burn-in on quarantined nodes that are due, and return those that pass to service."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State as FlowState
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import PositiveFloat

from holdfast.flows.cluster_health import THIS_MACHINE
from holdfast.prefect_client.flow_end import run_or_fail
from holdfast.prefect_client.named_clusters import ClusterParameter, cluster_name, resolve_cluster
from holdfast.probe.burn_in.repair import open_repair
from holdfast.spec import Cluster
from holdfast.tasks.repair import begin, burn_in, conclude, find, publish


def _run_name() -> str:
    return f"repair of {cluster_name(flow_run.parameters['cluster'])}"


@flow(name="node-repair", flow_run_name=_run_name, retries=0, validate_parameters=True)
def node_repair(
    cluster: ClusterParameter = THIS_MACHINE, nodes: list[str] | None = None, seconds: PositiveFloat | None = None
) -> FlowState:
    """Return nodes that pass a burn-in to service. A node that fails stays isolated, is tested less often, and in the end decommissioned.

    Args:
        cluster: The cluster to repair: local:1 (the worker's machine), the name of a saved cluster, or the path of a cluster file.
        nodes: Nodes to test now, whether they are due or not; empty: those that are due.
        seconds: Duration of the burn-in of one node; empty: the cluster's `burn_in.duration`.
    """
    return run_or_fail(lambda: _repair(resolve_cluster(cluster), nodes, seconds))


def _repair(cluster: Cluster, nodes: list[str] | None, seconds: float | None) -> FlowState:
    with open_repair(cluster, seconds, nodes or ()):
        due = find(cluster.name, nodes)
        started = begin(cluster.name, due)
        if started:
            burn_in(cluster.name, started)
            conclude(cluster.name)
        if not due:
            return Completed(message="no node is due for a burn-in")
        return Completed(message=publish(cluster.name))
