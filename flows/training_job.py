"""The training-job flow: one job's life as a state machine; it turns once an incident."""

from __future__ import annotations

if __name__ == "__main__":
    from holdfast.control.supervisor.detach import handle_sigusr1

    handle_sigusr1()  # to import Prefect takes seconds

import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from prefect import flow
from prefect.client.schemas.objects import State as FlowState

from holdfast.prefect_client.crashed_run import explain_crash
from holdfast.prefect_client.job_task import JobTask
from holdfast.prefect_client.named_clusters import Choice
from holdfast.prefect_client.supervised_job import supervise
from holdfast.spec import TrainingJob
from policies.states import TRANSITIONS, Event, State
from tasks.decide import decide
from tasks.detect import detect
from tasks.isolate import isolate
from tasks.launch import launch
from tasks.migrate import migrate
from tasks.monitor import monitor
from tasks.reschedule import reschedule
from tasks.resume import resume
from tasks.wait import wait


class Stage(NamedTuple):
    """A state of the machine: the task that runs in it, and where each of its outcomes leads."""

    task: JobTask
    outcomes: Mapping[Event, State]


MACHINE: Final[Mapping[State, Stage]] = {
    State.LAUNCHING: Stage(launch, TRANSITIONS[State.LAUNCHING]),
    State.RUNNING: Stage(monitor, TRANSITIONS[State.RUNNING]),
    State.DIAGNOSING: Stage(detect, TRANSITIONS[State.DIAGNOSING]),
    State.DECIDING: Stage(decide, TRANSITIONS[State.DECIDING]),
    State.ISOLATING: Stage(isolate, TRANSITIONS[State.ISOLATING]),
    State.RESCHEDULING: Stage(reschedule, TRANSITIONS[State.RESCHEDULING]),
    State.RESUMING: Stage(resume, TRANSITIONS[State.RESUMING]),
    State.WAITING: Stage(wait, TRANSITIONS[State.WAITING]),
    State.MIGRATING: Stage(migrate, TRANSITIONS[State.MIGRATING]),
}


@flow(name="training-job", flow_run_name="train {job.name}", validate_parameters=True, retries=0, on_crashed=[explain_crash])
def training_job(job: TrainingJob, cluster: Choice = "local", standby: bool = False) -> FlowState:  # noqa: FBT001, FBT002 (a switch of Prefect's form)
    """Keep a training job running through faults until it completes, fails for good, or is stopped.

    A job of this name that already runs without a flow is adopted: no step is lost and no worker restarts.

    Args:
        job: What to run, on how many nodes, and how it recovers.
        cluster: Where the nodes come from: a cluster, or the name of one (`local:3`, a saved one, a file).
        standby: Wait while another flow steers the job, and take over when that dies.
    """
    with supervise(job, cluster, standby=standby) as run:
        while run.live:
            run.apply(MACHINE[run.state].task(run))
    return run.final_state()


if __name__ == "__main__":
    from flows.training_job import training_job as steer  # under its importable name, as tasks and artifacts will know it
    from holdfast.prefect_client import flow_program

    sys.exit(flow_program.main(sys.argv[1:], steer))
