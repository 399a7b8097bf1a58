"""Resume: start the new generation and see it to its first step."""

from __future__ import annotations

from holdfast.control.recovery import path
from holdfast.control.supervisor.controller import JobController
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.states import Event, Transition


@job_task("resume", task_titles.resume)
def resume(run: JobController) -> Transition:
    """Start the workers and wait for the first new step, within the deadline of the action."""
    if run.incidents.current is None:
        return Transition(Event.STARTED, "the flow before had seen the ranks at work, and died before it could say so")
    return path.resume(run)
