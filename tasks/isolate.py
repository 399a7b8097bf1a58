"""Isolate: stop the ranks that are to stop, at once, and take unhealthy nodes out."""

from __future__ import annotations

from holdfast.control.recovery import path
from holdfast.control.supervisor.controller import JobController
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.states import Transition


@job_task("isolate", task_titles.isolate)
def isolate(run: JobController) -> Transition:
    """Stop all ranks in one go, or those that have to leave, and release the nodes that the decision drops."""
    return path.isolate(run)
