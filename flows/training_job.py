"""The training-job flow: one job's life as a state machine; it turns once an incident."""

from __future__ import annotations

if __name__ == "__main__":
    from holdfast.control.handover import heed_from_now_on

    heed_from_now_on()  # to import Prefect takes seconds

import sys
from collections.abc import Callable
from typing import Final

from prefect import flow
from prefect.client.schemas.objects import State as FlowState
from prefect.states import Cancelled, Completed, Failed

from flows.ending import ended_in_words
from holdfast.control.run import Run
from holdfast.control.steering import steering
from holdfast.control.wheel import Aside, Ended
from holdfast.spec import Cluster, LocalCluster, TrainingJob
from policies.states import State
from tasks.ask import Asker
from tasks.detect import detect
from tasks.isolate import isolate
from tasks.launch import launch
from tasks.migrate import migrate
from tasks.monitor import monitor
from tasks.publish import Publisher
from tasks.reschedule import reschedule
from tasks.resume import resume
from tasks.turn import Turn
from tasks.wait import wait

TURNS: Final[dict[State, Callable[[str], Turn | None]]] = {
    State.LAUNCHING: launch,
    State.RUNNING: monitor,
    State.DIAGNOSING: detect,
    State.ISOLATING: isolate,
    State.RESCHEDULING: reschedule,
    State.RESUMING: resume,
    State.WAITING: wait,
    State.MIGRATING: migrate,
}
"""Which task takes a job out of which state."""

THIS_MACHINE: Final = LocalCluster()


@flow(name="training-job", flow_run_name="train {job.name}", validate_parameters=True)
def training_job(job: TrainingJob, cluster: Cluster = THIS_MACHINE, standby: bool = False) -> FlowState:  # noqa: FBT001, FBT002 (a switch of Prefect's form)
    """Keep a training job running through faults until it completes, fails for good, or is stopped.

    A job of this name that already runs without a flow is adopted: no step is lost and no worker restarts.

    Args:
        job: What to run, on how many nodes, and how it recovers.
        cluster: Where the nodes come from.
        standby: Wait while another flow steers the job, and take over when that dies.
    """
    return ended_in_words(lambda: _train(job, cluster, standby=standby))


def _train(job: TrainingJob, cluster: Cluster, *, standby: bool) -> FlowState:
    publisher = Publisher(job.name)
    with Asker() as asker, steering(job, cluster, publisher.tell, standby=standby) as run:
        if not isinstance(run, Aside):
            asker.follow(run.job.id)
        while isinstance(run, Run) and not (run.over or run.handed_over):
            turn = TURNS[run.state](job.name)
            if turn is not None:
                run.move(*turn)
    publisher.close()
    return verdict(run)


def verdict(run: Run | Ended | Aside) -> FlowState:
    """Return the job's end as Prefect's, with the words that moved it there; a flow that let go of its job was cancelled."""
    if isinstance(run, Aside):
        return Cancelled(message=run.moved)
    if isinstance(run, Run) and run.handed_over:
        return Cancelled(message=f"handed over, the job trains on: {run.handover.why}")
    if run.state is State.COMPLETED:
        return Completed(message=run.moved)
    return Cancelled(message=run.moved) if run.state is State.CANCELLED else Failed(message=run.moved)


if __name__ == "__main__":
    from flows import program
    from flows.training_job import training_job as steer  # under its importable name, as tasks and artifacts will know it

    sys.exit(program.main(sys.argv[1:], steer))
