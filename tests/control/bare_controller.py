"""A real controller of a job of which nothing runs: its parts are real, a test sets what its agents report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.cluster import open_cluster
from holdfast.control.agents.pool import AgentPool
from holdfast.control.config.worker_env import prepare_fields
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.detach import Detach
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.control.supervisor.requests import Requests
from holdfast.history import Recorder, models, queries
from holdfast.spec import Cluster, LocalCluster, TrainingJob
from tests.fresh_history import fresh_history


@contextmanager
def bare_controller(
    place: Path, membership: dict[str, list[int]], *, cluster: Cluster | None = None, **spec: Any
) -> Iterator[JobController]:
    """Return the controller of a job in its first generation, whose history is in *place*; *spec*: keys of its job file."""
    history = fresh_history(place / "history.db")
    recorder = Recorder(history, place / "outbox_path")
    keys = {"name": "j", "command": [sys.executable], "workdir": str(place), "nnodes": len(membership), **spec}
    job_file = TrainingJob.model_validate(keys)
    cluster = cluster or LocalCluster(name="c", nodes=len(membership), directory=str(place))
    job = models.Job(name=job_file.name, spec={}, cluster={"name": cluster.name}, directory=str(place), at=0.0)
    recorder.add(job)
    lease = models.Lease(job_id=job.id, epoch=1, holder="", host="", pid=0, pid_started=0.0, expires_at=0.0)
    detach, flow_run = Detach(), FlowRun()
    controller = JobController(
        job=job,
        spec=job_file,
        cluster=cluster,
        history=history,
        recorder=recorder,
        agents=AgentPool(open_cluster(cluster), prepare_fields(job_file, cluster, job), epoch=1),
        requests=Requests(history, recorder, lease, detach, flow_run),
        detach=detach,
        flow_run=flow_run,
    )
    table = RankTable.fresh(1, membership, ("127.0.0.1", 1), every=None)
    controller.generations.enter(1, dict(membership), rank_table=table, reason="launch")
    try:
        yield controller
    finally:
        controller.requests.close()
        controller.agents.close(end=False)
        recorder.close()
        history.close()


def recorded_events(controller: JobController) -> list[str]:
    """Return the texts of the recorded events, oldest first."""
    assert controller.recorder.flush(60.0)
    return [one.text for one in queries.job_events(controller.history, controller.job.id)]
