"""Training jobs and cluster checks as building blocks for your own Prefect flows.

    from holdfast.workflows import evaluate_checkpoint, probe_cluster, training_job, wait_for_capacity

`training_job`, `cluster_health` and `node_repair` are flows, the others are tasks; `docs/how-to/workflows.md` shows how they fit together.
"""

from __future__ import annotations

from typing import Any, ParamSpec

from prefect.flows import Flow

from holdfast.checkpoints.inventory import CheckpointInfo
from holdfast.errors import BurnInFailed, CapacityTimeout, EvaluationFailed, NoCheckpoint, TooFewHealthyNodes
from holdfast.evaluation import Evaluation
from holdfast.flows.cluster_health import cluster_health
from holdfast.flows.node_repair import node_repair
from holdfast.flows.training_job import training_job as _training_job
from holdfast.probe.burn_in.repair import BurnInReport, NodeBurnIn
from holdfast.probe.health.capacity import Capacity
from holdfast.probe.health.checkup import ClusterHealth, NodeHealth
from holdfast.spec import Cluster, LocalCluster, SlurmCluster, SshCluster, TrainingJob, load_cluster, load_job
from holdfast.tasks.building_blocks import burn_in_nodes, evaluate_checkpoint, latest_checkpoint, probe_cluster, wait_for_capacity
from holdfast.training_result import TrainingResult, training_result

P = ParamSpec("P")


def _typed(flow: Flow[P, Any]) -> Flow[P, TrainingResult]:
    """Annotate the result of *flow*: it returns a Prefect state, and the caller gets its data."""
    return flow


training_job = _typed(_training_job)

__all__ = [
    "BurnInFailed",
    "BurnInReport",
    "Capacity",
    "CapacityTimeout",
    "CheckpointInfo",
    "Cluster",
    "ClusterHealth",
    "Evaluation",
    "EvaluationFailed",
    "LocalCluster",
    "NoCheckpoint",
    "NodeBurnIn",
    "NodeHealth",
    "SlurmCluster",
    "SshCluster",
    "TooFewHealthyNodes",
    "TrainingJob",
    "TrainingResult",
    "burn_in_nodes",
    "cluster_health",
    "evaluate_checkpoint",
    "latest_checkpoint",
    "load_cluster",
    "load_job",
    "node_repair",
    "probe_cluster",
    "training_job",
    "training_result",
    "wait_for_capacity",
]
