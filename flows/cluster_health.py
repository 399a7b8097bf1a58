"""The cluster-health flow: probe every node from outside, assess its health, and record and publish the result."""

from __future__ import annotations

import time
from typing import Final

from prefect import flow
from prefect.client.schemas.objects import State as FlowState
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import PositiveFloat, PositiveInt

from holdfast.prefect_client.flow_end import run_or_fail
from holdfast.prefect_client.named_clusters import ClusterParameter, cluster_name, resolve_cluster
from holdfast.probe.health.checkup import open_checkup
from holdfast.probe.sweep import DEADLINE
from holdfast.spec import Cluster
from holdfast.tasks.probe import classify, publish, record, sweep

THIS_MACHINE: Final = "local:1"


def _run_name() -> str:
    return f"health of {cluster_name(flow_run.parameters['cluster'])}"


@flow(name="cluster-health", flow_run_name=_run_name, retries=0, validate_parameters=True)
def cluster_health(
    cluster: ClusterParameter = THIS_MACHINE, deadline: PositiveFloat = DEADLINE, sweeps: PositiveInt = 1, every: PositiveFloat = 60.0
) -> FlowState:
    """Find unhealthy and unreachable nodes before a job is placed on them.

    Args:
        cluster: The cluster to probe: local:1 (the worker's machine), the name of a saved cluster, or the path of a cluster file.
        deadline: Seconds that one attempt to probe one node may take.
        sweeps: How often to probe all nodes before this run ends. Use 1 on a schedule.
        every: Seconds from the start of one sweep to the start of the next.
    """
    return run_or_fail(lambda: _sweep(resolve_cluster(cluster), deadline, sweeps, every))


def _sweep(cluster: Cluster, deadline: float, sweeps: int, every: float) -> FlowState:
    started, summary = time.time(), ""
    with open_checkup(cluster):
        for number in range(sweeps):
            sweep(cluster.name, deadline=deadline, at=started + number * every)
            classify(cluster.name)
            record(cluster.name)
            summary = publish(cluster.name).message or ""
    return Completed(message=summary)
