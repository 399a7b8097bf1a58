"""Run a job from a flow: take and release control of it, connect it with Prefect, and turn functions into the tasks of its states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial, wraps
from typing import Any, Final, TypeAlias, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State as PrefectState
from prefect.context import TaskRunContext
from prefect.exceptions import Pause
from prefect.states import Cancelled, Completed, Failed

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.leadership import Deposed, JobEnded
from holdfast.control.supervisor.supervise import control_job
from holdfast.errors import HoldfastError, JobDetached
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.policies.states import Event, State, Transition
from holdfast.prefect_client.approvals import ApprovalRuns
from holdfast.prefect_client.flow_end import failed_state, hide_tracebacks
from holdfast.prefect_client.named_clusters import ClusterParameter, resolve_cluster
from holdfast.prefect_client.own_flow_run import OwnFlowRun
from holdfast.prefect_client.publisher import Publisher
from holdfast.prefect_client.run_titles import FlowLog
from holdfast.spec import Cluster, TrainingJob
from holdfast.training_result import TrainingResult


@contextmanager
def supervise(spec: TrainingJob, cluster: ClusterParameter, *, standby: bool = False) -> Iterator[SupervisedJob]:
    """Launch a job or reattach to it, and control it while the block runs; as a *standby*, once no other controller runs it.

    A `HoldfastError` ends the flow as failed, with the error's message. Outside a Prefect worker the error is raised.
    """
    hide_tracebacks()
    run = SupervisedJob(spec, standby=standby)
    entered = False
    try:
        with run.controlled(resolve_cluster(cluster)):
            entered = True
            yield run
    except HoldfastError as error:
        run.failure = failed_state(error)
        if not entered:
            yield run


class SupervisedJob:
    """A job that this flow run controls; the flow passes it from task to task.

    Not a dataclass: Prefect searches those for futures, and the controller in it is large.
    """

    _own: OwnFlowRun
    _approvals: ApprovalRuns
    _control: ExitStack
    _take: Callable[[], AbstractContextManager[JobController | JobEnded | Deposed]]

    def __init__(self, spec: TrainingJob, *, standby: bool) -> None:
        self.previous: PrefectState[Any] | None = None
        """State of the previous task run, which the next one follows in the graph."""
        self.transition: Transition | None = None
        """What the running task decided. It is no result of the task in Prefect, which finds the origin of a result by its address and
        would draw arrows to other tasks from whatever is at that address later."""
        self.failure: PrefectState | None = None
        """The flow's final state if an error ended it."""
        self._spec, self._standby = spec, standby
        self._held: JobController | JobEnded | Deposed | None = None
        """The job's controller; or, where this flow does not control the job, why."""

    @contextmanager
    def controlled(self, cluster: Cluster) -> Iterator[None]:
        """Control the job while the block runs, together with all threads that talk to the Prefect server for it."""
        with closing(Publisher(self._spec.name)) as publisher:
            publish = FlowLog(self._spec.name, publisher.publish).publish
            with OwnFlowRun() as self._own, ApprovalRuns() as self._approvals, ExitStack() as self._control:
                self._take = partial(control_job, self._spec, cluster, publish, standby=self._standby, flow_run=self._own.flow_run)
                self._take_control()
                yield

    def _take_control(self) -> None:
        """Take control, or learn who has it; try again if this flow run was suspended meanwhile and is resumed."""
        while True:
            held = self._held = self._control.enter_context(self._take())
            if not isinstance(held, Deposed):
                self._approvals.follow(held.job.id)
            if isinstance(held, JobController):
                self._own.control(held)
                if held.suspended:
                    if held.requests.stop_reason:
                        held.move(Event.STOP_ASKED, held.requests.stop_reason)
                    else:
                        held.move(
                            Event.RESUME_ASKED,
                            f"resumed; it was suspended after step {held.generations.best}" if held.generations.best else "resumed",
                        )
            if not (isinstance(held, Deposed) and self._own.flow_run.suspended):
                return
            self._control.close()
            self._own.leave_suspended("")

    @property
    def controller(self) -> JobController:
        """The job's controller."""
        assert isinstance(self._held, JobController)
        return self._held

    @property
    def live(self) -> bool:
        """Whether this flow controls the job and the job has not ended."""
        return isinstance(self._held, JobController) and self._held.live

    @property
    def state(self) -> State:
        """The job's state."""
        return self.controller.state

    def apply(self, transition: Transition | None) -> None:
        """Move the job to its next state. If that is SUSPENDED, release it, and take it again when this process resumes the flow run."""
        if transition is not None:
            self.controller.move(*transition)
        if self.controller.suspended:
            self._control.close()
            self._own.leave_suspended(self.controller.saved)
            self.previous = None
            self._take_control()

    def note_suspended(self) -> str:
        """Record that this flow run was suspended; return the reason."""
        flow_run = self._own.flow_run
        flow_run.suspended = flow_run.suspended or "suspended in Prefect"
        return flow_run.suspended

    def final_state(self) -> PrefectState:
        """Return the flow run's final state: the job's end with its reason; cancelled if this flow no longer controls the job."""
        held = self._held
        if self.failure is not None or held is None:
            assert self.failure is not None
            return self.failure
        if isinstance(held, Deposed):
            return Cancelled(message=held.reason)
        if isinstance(held, JobController) and held.detached:
            return Cancelled(message=f"detached, training continues: {held.detach.why}")
        if held.state is State.COMPLETED:  # the data is what a flow that calls this one gets back
            return Completed(message=held.reason, data=TrainingResult.of(held.job, str(held.state), held.reason))
        message = f"{held.reason}; {held.saved}" if isinstance(held, JobController) and held.saved else held.reason
        return Cancelled(message=message) if held.state is State.CANCELLED else Failed(message=message)


Work: TypeAlias = Callable[[JobController], Transition]
Title: TypeAlias = Callable[[JobController, Transition, float], str]
"""Returns the name of a finished task run from the job, the transition, and the duration in seconds."""
JobTask: TypeAlias = Callable[[SupervisedJob], "Transition | None"]
"""Runs in a state of the job and returns the transition; none if the controller detached from its job meanwhile."""

STATE_NAMES: Final[Mapping[Event, str]] = {
    Event.FAULTED: "Fault seen",
    Event.FAILED: "Failed the job",
    Event.PLACED: "Rescheduled",
    Event.STARTED: "Running",
    Event.GAINED: "Nodes found",
    Event.SHORT: "Too few nodes",
    Event.ASKED: "Approval needed",
    Event.MOVE_ASKED: "Migration requested",
    Event.MOVED: "Migrated",
    Event.MOVE_FAILED: "Not migrated",
    Event.STOP_ASKED: "Stop requested",
    Event.SUSPEND_ASKED: "Suspend requested",
    Event.TIME_OVER: "Time limit reached",
}
"""Name of a task's state in Prefect by the event; other events are their own names. All have the type COMPLETED: a task that finds a fault
has not failed, and Prefect never starts a task that follows a failed one."""


def job_task(name: str, title: Title) -> Callable[[Work], JobTask]:
    """Turn a function of the job's controller into the Prefect task *name*; *title* names each finished run of it.

    Prefect searches the arguments of a task for futures, also in dataclasses and lists. A `SupervisedJob` is neither, so the controller is
    not searched. It is not stored either: the task has no cache, and its result is not persisted.
    """

    def decorate(work: Work) -> JobTask:
        @task(name=name, task_run_name=name, cache_policy=NO_CACHE, retries=0, persist_result=False, description=work.__doc__)
        def run_task(run: SupervisedJob) -> PrefectState[None]:
            started = time.monotonic()
            try:
                transition = work(run.controller)
            except JobDetached as error:
                return Completed(name="Detached", message=f"training continues: {error.why}")
            context = TaskRunContext.get()
            if context is not None:  # the server gets the new name with the run's next state
                context.task_run.name = title(run.controller, transition, time.monotonic() - started)
            state_name = STATE_NAMES.get(transition.event, transition.event.capitalize())
            run.transition = transition
            return Completed(name=state_name, message=transition.reason)

        @wraps(work)
        def follow(run: SupervisedJob) -> Transition | None:
            run.transition = None
            if not _is_shown(run.controller):
                run_task.fn(run)
                return run.transition
            try:
                state = run_task(run, wait_for=None if run.previous is None else [run.previous], return_state=True)
            except Pause:  # Prefect raises it instead of starting a task in a suspended flow run
                return Transition(Event.SUSPEND_ASKED, run.note_suspended())
            run.previous = cast("PrefectState[Any]", state)
            state.result()  # raises what the task raised
            return run.transition

        return cast("JobTask", follow)

    return decorate


def _is_shown(run: JobController) -> bool:
    """Return whether the task of the job's state appears in the graph: not if a retried step leaves it nothing to isolate or reschedule."""
    decision = run.incidents.current.decision if run.incidents.current is not None else None
    retried = decision is not None and decision.action is RecoveryAction.RETRY_STEP
    return not (retried and run.state in {State.ISOLATING, State.RESCHEDULING})
