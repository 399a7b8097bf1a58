"""The cluster-health flow: look at every node from outside, judge it by the look before, keep and show what was found."""

from __future__ import annotations

import time
from typing import Final

from prefect import flow
from prefect.client.schemas.objects import State as FlowState
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import PositiveFloat, PositiveInt

from holdfast.prefect_client.ending import ended_in_words
from holdfast.prefect_client.named_clusters import Choice, chosen, name_of
from holdfast.probe.health.checkup import open_checkup
from holdfast.probe.sweep import DEADLINE
from holdfast.spec import Cluster
from tasks.probe import classify, publish, record, sweep

THIS_MACHINE: Final = "local:1"


def _run_name() -> str:
    return f"health of {name_of(flow_run.parameters['cluster'])}"


@flow(name="cluster-health", flow_run_name=_run_name, retries=0, validate_parameters=True)
def cluster_health(
    cluster: Choice = THIS_MACHINE, deadline: PositiveFloat = DEADLINE, sweeps: PositiveInt = 1, every: PositiveFloat = 60.0
) -> FlowState:
    """Find unhealthy and silent nodes before a job lands on them.

    Args:
        cluster: Whose nodes to look at: local:1 (the worker's machine), the name of a saved cluster, or the path of a cluster file.
        deadline: Seconds that one attempt to look at one node may take.
        sweeps: How often to look before this run ends. One for a schedule: a run that waits for a further look stays running.
        every: Seconds from one look to the next, where there are several.
    """
    return ended_in_words(lambda: _look(chosen(cluster), deadline, sweeps, every))


def _look(cluster: Cluster, deadline: float, sweeps: int, every: float) -> FlowState:
    begun, said = time.time(), ""
    with open_checkup(cluster):
        for number in range(sweeps):
            sweep(cluster.name, deadline=deadline, at=begun + number * every)
            classify(cluster.name)
            record(cluster.name)
            said = publish(cluster.name).message or ""
    return Completed(message=said)
