"""Building blocks for users' own flows: tasks that check nodes, wait for them, and find and evaluate checkpoints.

Users import them, and the flow `training_job`, from `holdfast.workflows`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from holdfast.checkpoints.inventory import CheckpointInfo, latest
from holdfast.errors import BurnInFailed, TooFewHealthyNodes
from holdfast.evaluation import Evaluation, Program, command_of, evaluate
from holdfast.history import History, queries
from holdfast.plurals import plural
from holdfast.prefect_client.named_clusters import cluster_name, resolve_cluster
from holdfast.probe.burn_in.repair import BurnInReport, open_repair, run_burn_in
from holdfast.probe.health.capacity import Capacity, open_capacity_check, wait_for
from holdfast.probe.health.checkup import ClusterHealth, open_checkup
from holdfast.probe.health.checkup import cluster_health as health_of
from holdfast.probe.sweep import DEADLINE
from holdfast.report.text.wording import listing
from holdfast.spec import Cluster
from holdfast.stored_job import checkpoint_directory
from holdfast.tasks import probe, repair
from holdfast.training_result import TrainingResult


def _run_name(title: Callable[[Mapping[str, Any]], str]) -> Callable[[], str]:
    """Name a task run by the *title* of its parameters."""
    return lambda: title(task_run.parameters)


def _cluster_in(parameters: Mapping[str, Any]) -> str:
    return cluster_name(parameters["cluster"])


def _job_in(parameters: Mapping[str, Any]) -> str:
    job = parameters["job"]
    return str(getattr(job, "job", job))


def _checkpoint_in(parameters: Mapping[str, Any]) -> str:
    checkpoint = parameters["checkpoint"]
    return f"step {checkpoint.step}" if checkpoint is not None else "its latest checkpoint"


@task(name="probe-cluster", task_run_name=_run_name(lambda given: f"probe cluster {_cluster_in(given)}"), cache_policy=NO_CACHE)
def probe_cluster(
    cluster: Cluster | str, *, min_healthy: int | None = None, allow_degraded: bool = True, timeout_seconds: float = DEADLINE
) -> ClusterHealth:
    """Probe every node of a cluster once, from outside, and return the health of each.

    The result goes to the history, which a launch reads to avoid unhealthy nodes, and to the artifact `CLUSTER-nodes`.

    Args:
        cluster: The cluster to probe, or its name as in the run form (`local:3`, a saved one, a file).
        min_healthy: Raise `TooFewHealthyNodes` if fewer nodes are healthy; empty: never.
        allow_degraded: Count degraded nodes, which work but show a fault to monitor, as healthy.
        timeout_seconds: Limit for one attempt to reach one node.
    """
    cluster = resolve_cluster(cluster)
    with open_checkup(cluster) as checkup:
        probe.sweep.fn(cluster.name, deadline=timeout_seconds)
        probe.classify.fn(cluster.name)
        probe.record.fn(cluster.name)
        probe.publish.fn(cluster.name)
        found = health_of(checkup)
    get_run_logger().info(found.summary)
    healthy = found.can_train if allow_degraded else found.of("healthy")
    if min_healthy is not None and len(healthy) < min_healthy:
        others = "; ".join(str(one) for one in found.nodes if one.node not in healthy)
        raise TooFewHealthyNodes(cluster.name, min_healthy, len(healthy), others)
    return found


@task(
    name="burn-in-nodes",
    task_run_name=_run_name(lambda given: f"burn in {listing(given['nodes'])} of {_cluster_in(given)}"),
    cache_policy=NO_CACHE,
)
def burn_in_nodes(cluster: Cluster | str, nodes: Sequence[str], *, seconds: float | None = None, must_pass: bool = True) -> BurnInReport:
    """Test nodes with real work: processor, memory, disk, network and GPU. A quarantined node returns to service if it passes.

    Args:
        cluster: Whose nodes they are.
        nodes: Their names. None of them may hold a job.
        seconds: How long each node works; empty: as the cluster says (`burn_in.duration`).
        must_pass: Raise `BurnInFailed` unless every node passes; a node that could not be checked did not pass.
    """
    cluster = resolve_cluster(cluster)
    with open_repair(cluster, seconds, nodes) as work:
        report = run_burn_in(work, nodes)
        repair.publish.fn(cluster.name)
    for one in report.nodes:
        get_run_logger().log(logging.INFO if one.outcome == "passed" else logging.WARNING, "%s %s: %s", one.node, one.outcome, one.reason)
    if must_pass and not report.passed:
        raise BurnInFailed(
            cluster.name, tuple(f"{one.node} {one.outcome}: {one.reason}" for one in report.nodes if one.outcome != "passed")
        )
    return report


@task(
    name="wait-for-capacity",
    task_run_name=_run_name(lambda given: f"wait for {plural(given['nodes'], 'node')} of {_cluster_in(given)}"),
    cache_policy=NO_CACHE,
)
def wait_for_capacity(
    cluster: Cluster | str,
    *,
    nodes: int,
    labels: Mapping[str, str] | None = None,
    timeout_seconds: float = 3600.0,
    poll_seconds: float = 30.0,
) -> Capacity:
    """Wait until enough nodes of a cluster are free: healthy or degraded, without a job, not in quarantine, not in maintenance.

    Nothing is reserved: another job may be faster. A Slurm cluster is refused: its own queue waits, once a job is submitted.

    Args:
        cluster: Whose nodes to wait for.
        nodes: How many are needed.
        labels: Count only nodes that have all of these labels, as a job with `node_labels` does.
        timeout_seconds: Raise `CapacityTimeout` after so long.
        poll_seconds: Time between two checks.
    """
    logger, cluster = get_run_logger(), resolve_cluster(cluster)
    with open_capacity_check(cluster, labels) as check:
        found = wait_for(check, nodes, timeout_seconds=timeout_seconds, poll_seconds=poll_seconds, report=logger.info)
    logger.info("cluster '%s': %s free: %s", cluster.name, plural(len(found.free), "node"), ", ".join(found.free))
    return found


@task(name="latest-checkpoint", task_run_name=_run_name(lambda given: f"latest checkpoint of {_job_in(given)}"), cache_policy=NO_CACHE)
def latest_checkpoint(job: str | TrainingResult, *, verify: bool = True) -> CheckpointInfo:
    """Return the newest complete checkpoint of a job; raise `NoCheckpoint` if there is none.

    Args:
        job: The job's name, or what `training_job` returned. Its checkpoint folder must be visible from here.
        verify: Read every byte and compare it with the SHA-256 in the manifest; a damaged checkpoint is skipped for an older one.
    """
    return _latest(job, verify=verify)


@task(
    name="evaluate-checkpoint",
    task_run_name=_run_name(lambda given: f"evaluate {_job_in(given)} at {_checkpoint_in(given)}"),
    cache_policy=NO_CACHE,
)
def evaluate_checkpoint(  # noqa: PLR0913 (each is a field of a form)
    job: str | TrainingResult,
    *,
    script: str | os.PathLike[str] | None = None,
    command: Sequence[str] | None = None,
    args: Sequence[str] = (),
    checkpoint: CheckpointInfo | None = None,
    env: Mapping[str, str] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    timeout_seconds: float | None = None,
) -> Evaluation:
    """Run an evaluation on a checkpoint, on this machine, and return its metrics; raise `EvaluationFailed` if there are none.

    The evaluation finds the checkpoint's folder (`torch.distributed.checkpoint` format) in the environment variable `HOLDFAST_CHECKPOINT`
    and its step in `HOLDFAST_CHECKPOINT_STEP`; ``{checkpoint}`` and ``{step}`` in its arguments are replaced by them. It reports metrics as
    a JSON object: the last one that it prints on a line of its own, or the one in the file that `HOLDFAST_METRICS` names. What it prints
    goes to the run's log.

    Args:
        job: The job's name, or what `training_job` returned.
        script: A Python file, run by this Python.
        command: Any command instead of a script, `torchrun` for instance: program and arguments, one item each. No shell reads it.
        args: Arguments of the script.
        checkpoint: What to evaluate; empty: the newest complete, verified checkpoint.
        env: Further environment variables.
        workdir: Its working directory; empty: the one of this process.
        timeout_seconds: Kill it after so long; empty: never.
    """
    program = Program(command=command_of(script, command, args), env=env or {}, workdir=workdir, timeout_seconds=timeout_seconds)
    found = checkpoint if checkpoint is not None else _latest(job, verify=True)
    logger = get_run_logger()
    done = evaluate(found, program, logger.info)
    logger.info("step %d: %s", done.step, done.metrics)
    return done


def _latest(job: str | TrainingResult, *, verify: bool) -> CheckpointInfo:
    found = latest(_folder_of(job), job if isinstance(job, str) else job.job, verify=verify)
    for why in found.rejected:
        get_run_logger().warning("skipped: %s", why)
    return found


def _folder_of(job: str | TrainingResult) -> Path:
    if isinstance(job, TrainingResult):
        return job.checkpoint_directory
    with closing(History.open(create=False)) as history:
        return checkpoint_directory(queries.newest_job(history, job))
