"""Monitor: wait for the next thing that the flow has to turn for."""

from __future__ import annotations

from holdfast.control.config import gc_tuning
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.watch import SLICE, watch
from holdfast.prefect_client import task_titles
from holdfast.prefect_client.job_task import job_task
from policies.states import Transition


@job_task("monitor", task_titles.monitor)
def monitor(run: JobController) -> Transition:
    """Watch the job until something has to be answered: one task, however long that takes."""
    gc_tuning.collect_and_freeze()
    while (turn := watch(run, seconds=SLICE)) is None:
        gc_tuning.collect_everything()
    return turn
