"""The training-job flow: the state machine of one training job."""

from __future__ import annotations

if __name__ == "__main__":
    from holdfast.control.supervisor.detach import handle_sigusr1

    handle_sigusr1()  # before Prefect is imported, which takes seconds

import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from prefect import flow
from prefect.client.schemas.objects import State as FlowState

from holdfast.policies.states import TRANSITIONS, Event, State
from holdfast.prefect_client.flow_end import explain_crash
from holdfast.prefect_client.named_clusters import ClusterParameter
from holdfast.prefect_client.supervised_job import JobTask, supervise
from holdfast.spec import TrainingJob
from holdfast.tasks.training_job import decide, detect, isolate, launch, migrate, monitor, reschedule, resume, wait


class Stage(NamedTuple):
    """What happens in a state: the task that runs, and the next state for each of its outcomes."""

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
def training_job(job: TrainingJob, cluster: ClusterParameter = "local", standby: bool = False) -> FlowState:  # noqa: FBT001, FBT002 (a switch of Prefect's form)
    """Keep a training job running through faults until it completes, fails for good, or is stopped.

    If a job of this name already runs without a controller, reattach to it: no step is lost and no worker restarts.

    Args:
        job: What to run, on how many nodes, and how it recovers.
        cluster: Where the nodes come from: a cluster, or the name of one (`local:3`, a saved one, a file).
        standby: Wait while another controller runs the job, and take control when it dies.
    """
    with supervise(job, cluster, standby=standby) as run:
        while run.live:
            run.apply(MACHINE[run.state].task(run))
    return run.final_state()


if __name__ == "__main__":
    from holdfast.flows.training_job import training_job as flow_by_name  # tasks and artifacts need its importable name
    from holdfast.prefect_client import flow_program

    sys.exit(flow_program.main(sys.argv[1:], flow_by_name))
