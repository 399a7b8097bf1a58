"""Wait: for the nodes that a job needs, or for a person's word on those it has."""

from __future__ import annotations

from holdfast.control.recovery.incident_record import decided
from holdfast.control.recovery.wait import wait_for_approval, wait_for_capacity
from holdfast.control.supervisor.controller import JobController
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.case import RecoveryAction
from policies.states import Transition


@job_task("wait", task_titles.wait)
def wait(run: JobController) -> Transition:
    """Wait for what the decision is about: a person's approval, or nodes."""
    _, decision = decided(run)
    return wait_for_approval(run) if decision.action is RecoveryAction.ASK_A_PERSON else wait_for_capacity(run)
