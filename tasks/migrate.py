"""Migrate: let ranks go on elsewhere while training runs, or come back where they were missing."""

from __future__ import annotations

from holdfast.control.migration.grow_restart import grow_by_restart
from holdfast.control.migration.live import grow_live, move
from holdfast.control.supervisor.controller import JobController
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.states import Transition


@job_task("migrate", task_titles.migrate)
def migrate(run: JobController) -> Transition:
    """Carry out the oldest move that was asked for, or have missing ranks come; what keeps it from being done leaves training as it is."""
    if run.requests.moves:
        return move(run)
    return grow_by_restart(run) if run.scale_up.by_restart else grow_live(run)
