"""Launch: bring the nodes up, agree on the first membership, start the workers."""

from __future__ import annotations

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.launch import begin
from holdfast.control.supervisor.watch import ending
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.states import Transition


@job_task("launch", task_titles.launch)
def launch(run: JobController) -> Transition:
    """Start the job on fresh nodes, or go on watching a start that another controller began."""
    while (turn := begin(run) or ending(run)) is None:
        run.pump(0.0)  # other nodes are tried, or more are waited for, unless this controller is to detach
    return turn
