"""The training-job flow: one job's life as a state machine; it turns once an incident."""

from __future__ import annotations

if __name__ == "__main__":
    from holdfast.control.supervisor.detach import heed_from_now_on

    heed_from_now_on()  # to import Prefect takes seconds

import sys
from collections.abc import Mapping
from typing import Any, Final, cast

from prefect import flow
from prefect.client.schemas.objects import State as FlowState
from prefect.exceptions import Pause
from prefect.states import Cancelled, Completed, Failed

from flows.ending import ended_in_words
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.leadership import Deposed, JobEnded
from holdfast.control.supervisor.supervise import steering
from holdfast.prefect_client.approvals import ApprovalRuns
from holdfast.prefect_client.crashed_run import explain_crash
from holdfast.prefect_client.named_clusters import Choice, chosen
from holdfast.prefect_client.own_flow_run import OwnFlowRun
from holdfast.prefect_client.publisher import Publisher
from holdfast.spec import Cluster, TrainingJob
from holdfast.training_result import TrainingResult
from policies.case import RecoveryAction
from policies.states import Event, State
from tasks.decide import decide
from tasks.detect import detect
from tasks.flow_log import FlowLog
from tasks.isolate import isolate
from tasks.launch import launch
from tasks.migrate import migrate
from tasks.monitor import monitor
from tasks.reschedule import reschedule
from tasks.resume import resume
from tasks.turn import Step, Transition
from tasks.wait import wait

STEPS: Final[Mapping[State, Step]] = {
    State.LAUNCHING: launch,
    State.RUNNING: monitor,
    State.DIAGNOSING: detect,
    State.DECIDING: decide,
    State.ISOLATING: isolate,
    State.RESCHEDULING: reschedule,
    State.RESUMING: resume,
    State.WAITING: wait,
    State.MIGRATING: migrate,
}
"""Which task takes a job out of which state."""


@flow(name="training-job", flow_run_name="train {job.name}", validate_parameters=True, retries=0, on_crashed=[explain_crash])
def training_job(job: TrainingJob, cluster: Choice = "local", standby: bool = False) -> FlowState:  # noqa: FBT001, FBT002 (a switch of Prefect's form)
    """Keep a training job running through faults until it completes, fails for good, or is stopped.

    A job of this name that already runs without a flow is adopted: no step is lost and no worker restarts.

    Args:
        job: What to run, on how many nodes, and how it recovers.
        cluster: Where the nodes come from: a cluster, or the name of one (`local:3`, a saved one, a file).
        standby: Wait while another flow steers the job, and take over when that dies.
    """
    return ended_in_words(lambda: _train(job, chosen(cluster), standby=standby))


def _train(job: TrainingJob, cluster: Cluster, *, standby: bool) -> FlowState:
    """Control the job until it ends or this flow run is suspended; a suspended run that stays in its process continues here."""
    publisher = Publisher(job.name)
    tell = FlowLog(job.name, publisher.tell).tell
    try:
        with OwnFlowRun() as own, ApprovalRuns() as asker:
            while True:
                with steering(job, cluster, tell, standby=standby, flow_run=own.flow_run) as run:
                    if not isinstance(run, Deposed):
                        asker.follow(run.job.id)
                    if isinstance(run, JobController):
                        own.control(run)
                        drive(run)
                if isinstance(run, JobController) and run.suspended:
                    own.leave_suspended(run.saved)
                elif isinstance(run, Deposed) and own.flow_run.suspended:
                    own.leave_suspended("")
                else:
                    return verdict(run)
    finally:
        publisher.close()


def drive(run: JobController) -> None:
    """Take the job from state to state, each by its task, until it ends, is suspended, or another controller is to have it."""
    if run.suspended:
        run.move(*_taken_up(run))
    previous: FlowState[Any] | None = None
    while run.live:
        turn, previous = take(run, previous)
        if turn is not None:
            run.move(*turn)


def take(run: JobController, previous: FlowState[Any] | None) -> tuple[Transition | None, FlowState[Any] | None]:
    """Run the task of the job's state after the *previous* one; return its answer, and its state for the next one to follow."""
    step = STEPS[run.state]
    if not _takes_place(run):
        return cast("Transition | None", step.fn(run.job.name).data), previous
    try:
        state = step(run.job.name, wait_for=None if previous is None else [previous], return_state=True)
    except Pause:  # Prefect raises it instead of starting a task in a flow run that was suspended
        run.flow_run.suspended = run.flow_run.suspended or "suspended in Prefect"
        return Transition(Event.SUSPEND_ASKED, run.flow_run.suspended), previous
    return cast("Transition | None", state.result()), cast("FlowState[Any]", state)


def _takes_place(run: JobController) -> bool:
    """Tell whether the step of the job's state does something that a person would look for in the graph.

    Where a step is only to be tried again, nobody is isolated and no rank gets another place.
    """
    decision = run.incident.decision if run.incident is not None else None
    retried = decision is not None and decision.action is RecoveryAction.RETRY_STEP
    return not (retried and run.state in {State.ISOLATING, State.RESCHEDULING})


def _taken_up(run: JobController) -> Transition:
    """Return how a suspended job goes on: it is launched, unless it is to stop."""
    if run.requests.stop_reason:
        return Transition(Event.STOP_ASKED, run.requests.stop_reason)
    return Transition(Event.RESUME_ASKED, f"resumed; it was suspended after step {run.best}" if run.best else "resumed")


def verdict(run: JobController | JobEnded | Deposed) -> FlowState:
    """Return the job's end as Prefect's, with the words that moved it there; a flow that let go of its job was cancelled."""
    if isinstance(run, Deposed):
        return Cancelled(message=run.moved)
    if isinstance(run, JobController) and run.handed_over:
        return Cancelled(message=f"handed over, the job trains on: {run.handover.why}")
    if run.state is State.COMPLETED:  # the data is what a flow that calls this one gets back
        return Completed(message=run.moved, data=TrainingResult.of(run.job, str(run.state), run.moved))
    words = f"{run.moved}; {run.saved}" if isinstance(run, JobController) and run.saved else run.moved
    return Cancelled(message=words) if run.state is State.CANCELLED else Failed(message=words)


if __name__ == "__main__":
    from flows import program
    from flows.training_job import training_job as steer  # under its importable name, as tasks and artifacts will know it

    sys.exit(program.main(sys.argv[1:], steer))
