"""The tasks of the training-job flow, one per state: launch, monitor, detect, decide, isolate, reschedule, resume, wait, migrate.

Each takes the job's controller and returns the transition that moves the job on.
"""

from __future__ import annotations

from holdfast.control.config import gc_tuning
from holdfast.control.recovery import path
from holdfast.control.supervisor import stages
from holdfast.control.supervisor.controller import SLICE, JobController, ending, watch
from holdfast.control.supervisor.launch import begin
from holdfast.policies.states import Transition
from holdfast.prefect_client import run_titles
from holdfast.prefect_client.supervised_job import job_task


@job_task("launch", run_titles.launch)
def launch(run: JobController) -> Transition:
    """Start the job on fresh nodes, or continue a start that another controller began."""
    while (transition := begin(run) or ending(run)) is None:
        run.pump(0.0)  # try other nodes, or wait for more, unless this controller is to detach
    return transition


@job_task("monitor", run_titles.monitor)
def monitor(run: JobController) -> Transition:
    """Watch the job until something needs an answer: one task run, however long that takes."""
    gc_tuning.collect_and_freeze()
    while (transition := watch(run, seconds=SLICE)) is None:
        gc_tuning.collect_everything()
    return transition


@job_task("detect", run_titles.detect)
def detect(run: JobController) -> Transition:
    """Gather the evidence of an incident, find its root cause, and open the incident or add to it."""
    return stages.detect(run)


@job_task("decide", run_titles.decide)
def decide(run: JobController) -> Transition:
    """Let the job's policy choose a recovery action for the incident, and record the decision with its reasons."""
    return stages.decide(run)


@job_task("isolate", run_titles.isolate)
def isolate(run: JobController) -> Transition:
    """Stop all ranks, or only those that are replaced, and release the nodes that the decision drops."""
    return path.isolate(run)


@job_task("reschedule", run_titles.reschedule)
def reschedule(run: JobController) -> Transition:
    """Agree on the next membership: assign every rank to a node."""
    return path.reschedule(run)


@job_task("resume", run_titles.resume)
def resume(run: JobController) -> Transition:
    """Start the workers and wait for the first new step, within the deadline of the action."""
    return stages.resume(run)


@job_task("wait", run_titles.wait)
def wait(run: JobController) -> Transition:
    """Wait for an approval or for nodes, whichever the decision asks for."""
    return stages.wait(run)


@job_task("migrate", run_titles.migrate)
def migrate(run: JobController) -> Transition:
    """Carry out the oldest requested migration, or add missing ranks, while training runs. If it cannot be done, training continues."""
    return stages.migrate(run)
