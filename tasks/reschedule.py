"""Reschedule: agree on the next membership."""

from __future__ import annotations

from holdfast.control.recovery import path
from holdfast.control.supervisor.controller import JobController
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.states import Transition


@job_task("reschedule", task_titles.reschedule)
def reschedule(run: JobController) -> Transition:
    """Give every rank a node."""
    return path.reschedule(run)
