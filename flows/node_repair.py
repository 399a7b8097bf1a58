"""The node-repair flow: nodes whose quarantine has lasted long enough are tried with real work, and come back only when they pass."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State as FlowState
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import PositiveFloat

from flows.cluster_health import THIS_MACHINE
from holdfast.prefect_client.ending import ended_in_words
from holdfast.prefect_client.named_clusters import Choice, chosen, name_of
from holdfast.probe.burn_in.repair import open_repair
from holdfast.spec import Cluster
from tasks.repair import begin, burn_in, conclude, find, publish


def _run_name() -> str:
    return f"repair of {name_of(flow_run.parameters['cluster'])}"


@flow(name="node-repair", flow_run_name=_run_name, retries=0, validate_parameters=True)
def node_repair(cluster: Choice = THIS_MACHINE, nodes: list[str] | None = None, seconds: PositiveFloat | None = None) -> FlowState:
    """Bring nodes back that pass a burn-in; those that fail stay out, are tried less often, and are retired at last.

    Args:
        cluster: Whose nodes to try: local:1 (the worker's machine), the name of a saved cluster, or the path of a cluster file.
        nodes: Nodes to try now, whether they are due or not; empty: those that are due.
        seconds: How long a node works; empty: as the cluster says (`burn_in.seconds`).
    """
    return ended_in_words(lambda: _repair(chosen(cluster), nodes, seconds))


def _repair(cluster: Cluster, nodes: list[str] | None, seconds: float | None) -> FlowState:
    with open_repair(cluster, seconds, nodes or ()):
        wanted = find(cluster.name, nodes)
        begun = begin(cluster.name, wanted)
        if begun:
            burn_in(cluster.name, begun)
            conclude(cluster.name)
        if not wanted:
            return Completed(message="no node is due for a burn-in")
        return Completed(message=publish(cluster.name))
