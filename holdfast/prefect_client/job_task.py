"""A task of the job's state machine: what it does is a function of `holdfast.control`, how Prefect shows it is said here.

Its state carries a message, its name says what happened, and it follows the task before it in the graph of the flow run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeAlias, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State as TaskState
from prefect.context import TaskRunContext
from prefect.exceptions import Pause
from prefect.states import Completed

from holdfast.control.supervisor.controller import JobController
from holdfast.errors import JobDetached
from holdfast.prefect_client.supervised_job import SupervisedJob
from policies.case import RecoveryAction
from policies.states import Event, State, Transition

Work: TypeAlias = Callable[[JobController], Transition]
Title: TypeAlias = Callable[[JobController, Transition, float], str]
"""Names a task run once it is over, from the job, the transition, and the seconds that it took."""
JobTask: TypeAlias = Callable[[SupervisedJob], "Transition | None"]
"""Runs in a state of the job and returns the transition; none where the controller was told to detach from its job meanwhile."""

STATE_NAMES: Final[Mapping[Event, str]] = {
    Event.FAULTED: "Fault seen",
    Event.GAVE_UP: "Failed the job",
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
"""What Prefect shows as a task's state; every other event is its own name. All are of the type COMPLETED: a fault is no failure of the
task that found it, and a task after a failed one would never start."""


def job_task(name: str, title: Title) -> Callable[[Work], JobTask]:
    """Make a task called *name* of a function that takes the job's controller, and have *title* name each of its runs at its end.

    Prefect looks for futures in what a task is given, in dataclasses and lists too: a `SupervisedJob` is neither, so nothing behind it
    is searched. Nor is it stored: the task has no cache, and its result is not persisted.
    """

    def decorate(work: Work) -> JobTask:
        @task(name=name, task_run_name=name, cache_policy=NO_CACHE, retries=0, persist_result=False, description=work.__doc__)
        def run_task(run: SupervisedJob) -> TaskState[Transition | None]:
            begin = time.monotonic()
            try:
                transition = work(run.controller)
            except JobDetached as error:
                return Completed(name="Detached", message=f"training continues: {error.why}")
            _rename(title(run.controller, transition, time.monotonic() - begin))
            state_name = STATE_NAMES.get(transition.event, transition.event.capitalize())
            return Completed(name=state_name, message=transition.reason, data=transition)

        @wraps(work)
        def follow(run: SupervisedJob) -> Transition | None:
            if not _is_shown(run.controller):
                return cast("Transition | None", run_task.fn(run).data)
            try:
                state = run_task(run, wait_for=None if run.previous is None else [run.previous], return_state=True)
            except Pause:  # Prefect raises it instead of starting a task in a flow run that was suspended
                return Transition(Event.SUSPEND_ASKED, run.note_suspended())
            run.previous = cast("TaskState[Any]", state)
            return cast("Transition | None", state.result())

        return cast("JobTask", follow)

    return decorate


def _is_shown(run: JobController) -> bool:
    """Tell whether the task of the job's state does something that a person would look for in the graph.

    Where a step is only to be tried again, nobody is isolated and no rank gets another place.
    """
    decision = run.incidents.current.decision if run.incidents.current is not None else None
    retried = decision is not None and decision.action is RecoveryAction.RETRY_STEP
    return not (retried and run.state in {State.ISOLATING, State.RESCHEDULING})


def _rename(title: str) -> None:
    """Name the task run that this is called in; the server learns it with the run's next state."""
    context = TaskRunContext.get()
    if context is not None:
        context.task_run.name = title
