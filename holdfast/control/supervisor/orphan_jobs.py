"""End a job that no flow steers: its agents are told, and the history says so."""

from __future__ import annotations

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.supervise import steering
from holdfast.history import History, Job
from holdfast.stored_job import recorded_cluster, recorded_spec
from policies.states import Event


def end(_history: History, job: Job) -> None:
    """Take the lease of *job*, end its workers and agents, and record it as cancelled; raise `JobAlreadyRunning` when a flow lives."""
    spec, cluster = recorded_spec(job), recorded_cluster(job)
    with steering(spec, cluster) as run:
        if isinstance(run, JobController) and not run.ended:
            run.move(Event.STOP_ASKED, "stopped while no flow steered it")
