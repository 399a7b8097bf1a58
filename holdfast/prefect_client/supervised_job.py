"""Supervise a job from a flow run: control it, publish it, bring a person's wishes in Prefect to it, and say how it ended.

What is taken and given back here, from the lease to the threads that talk to the server, leaves the flow a loop over its state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from typing import Any

from prefect.client.schemas.objects import State as FlowState
from prefect.states import Cancelled, Completed, Failed

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.leadership import Deposed, JobEnded
from holdfast.control.supervisor.supervise import control_job
from holdfast.errors import HoldfastError
from holdfast.prefect_client.approvals import ApprovalRuns
from holdfast.prefect_client.ending import failed_in_words, prepare_ending
from holdfast.prefect_client.flow_log import FlowLog
from holdfast.prefect_client.named_clusters import Choice, chosen
from holdfast.prefect_client.own_flow_run import OwnFlowRun
from holdfast.prefect_client.publisher import Publisher
from holdfast.spec import Cluster, TrainingJob
from holdfast.training_result import TrainingResult
from policies.states import Event, State, Transition


@contextmanager
def supervise(spec: TrainingJob, cluster: Choice, *, standby: bool = False) -> Iterator[SupervisedJob]:
    """Have the job supervised while the block runs: launch it, or reattach to it; as a *standby*, once no other flow controls it.

    What keeps the flow from its work ends it as failed, in the error's own words; a program that runs the flow itself gets the error.
    """
    prepare_ending()
    run = SupervisedJob(spec, standby=standby)
    begun = False
    try:
        with run.taken(chosen(cluster)):
            begun = True
            yield run
    except HoldfastError as error:
        run.failure = failed_in_words(error)
        if not begun:
            yield run


class SupervisedJob:
    """A job that this flow run supervises: what its tasks are given, one after the other.

    No dataclass: Prefect looks into those for futures, and the controller behind this is large.
    """

    _own: OwnFlowRun
    _approvals: ApprovalRuns
    _control: ExitStack
    _steer: Callable[[], AbstractContextManager[JobController | JobEnded | Deposed]]

    def __init__(self, spec: TrainingJob, *, standby: bool) -> None:
        self.previous: FlowState[Any] | None = None
        """State of the task run before, which the next one follows in the graph."""
        self.failure: FlowState | None = None
        """What kept the flow from its work."""
        self._spec, self._standby = spec, standby
        self._held: JobController | JobEnded | Deposed | None = None
        """The job's controller; or, where this flow does not control it, why."""

    @contextmanager
    def taken(self, cluster: Cluster) -> Iterator[None]:
        """Control the job while the block runs, with all that speaks with Prefect for it."""
        with closing(Publisher(self._spec.name)) as publisher:
            tell = FlowLog(self._spec.name, publisher.tell).tell
            with OwnFlowRun() as self._own, ApprovalRuns() as self._approvals, ExitStack() as self._control:
                self._steer = partial(control_job, self._spec, cluster, tell, standby=self._standby, flow_run=self._own.flow_run)
                self._take_control()
                yield

    def _take_control(self) -> None:
        """Take control, or learn why another has it; again where this flow run was suspended meanwhile, and is resumed."""
        while True:
            held = self._held = self._control.enter_context(self._steer())
            if not isinstance(held, Deposed):
                self._approvals.follow(held.job.id)
            if isinstance(held, JobController):
                self._own.control(held)
                if held.suspended:
                    held.move(*_taken_up(held))
            if not (isinstance(held, Deposed) and self._own.flow_run.suspended):
                return
            self._control.close()
            self._own.leave_suspended("")

    @property
    def controller(self) -> JobController:
        """The job as this process controls it."""
        assert isinstance(self._held, JobController)
        return self._held

    @property
    def live(self) -> bool:
        """Whether there is still something to do for the job."""
        return isinstance(self._held, JobController) and self._held.live

    @property
    def state(self) -> State:
        """Where the job is in its life."""
        return self.controller.state

    def apply(self, transition: Transition | None) -> None:
        """Move the job on. One that is suspended is left, and taken up again where its flow run is resumed in this process."""
        if transition is not None:
            self.controller.move(*transition)
        if self.controller.suspended:
            self._control.close()
            self._own.leave_suspended(self.controller.saved)
            self.previous = None
            self._take_control()

    def note_suspended(self) -> str:
        """Note that this flow run was suspended; return why."""
        flow_run = self._own.flow_run
        flow_run.suspended = flow_run.suspended or "suspended in Prefect"
        return flow_run.suspended

    def final_state(self) -> FlowState:
        """Return the job's end as Prefect's, with the words that moved it there; a flow that no longer controls its job was cancelled."""
        held = self._held
        if self.failure is not None or held is None:
            assert self.failure is not None
            return self.failure
        if isinstance(held, Deposed):
            return Cancelled(message=held.reason)
        if isinstance(held, JobController) and held.detached:
            return Cancelled(message=f"detached, the job trains on: {held.detach.why}")
        if held.state is State.COMPLETED:  # the data is what a flow that calls this one gets back
            return Completed(message=held.reason, data=TrainingResult.of(held.job, str(held.state), held.reason))
        words = f"{held.reason}; {held.saved}" if isinstance(held, JobController) and held.saved else held.reason
        return Cancelled(message=words) if held.state is State.CANCELLED else Failed(message=words)


def _taken_up(run: JobController) -> Transition:
    """Return how a suspended job goes on: it is launched, unless it is to stop."""
    if run.requests.stop_reason:
        return Transition(Event.STOP_ASKED, run.requests.stop_reason)
    return Transition(
        Event.RESUME_ASKED, f"resumed; it was suspended after step {run.generations.best}" if run.generations.best else "resumed"
    )
