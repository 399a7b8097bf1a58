"""One step of the state machine as a Prefect task: its state carries a message, and its name says what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State as TaskState
from prefect.context import TaskRunContext
from prefect.states import Completed

from holdfast.control.supervisor import registry
from holdfast.control.supervisor.controller import JobController
from holdfast.errors import HandedOver
from policies.states import Event


class Transition(NamedTuple):
    """What a step answers: the event that moves the job on, and why."""

    event: Event
    reason: str


Work: TypeAlias = Callable[[JobController], Transition]
Title: TypeAlias = Callable[[JobController, Transition, float], str]
"""Names a step once it is over, from the run, its answer, and the seconds that it took."""
Step: TypeAlias = Task[[str], "TaskState[Transition | None]"]

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
"""What Prefect shows as a step's state; every other event is its own name. All are of the type COMPLETED: a fault is no failure of the
task that found it, and a task after a failed one would never start."""


def step(name: str, title: Title) -> Callable[[Work], Step]:
    """Make a Prefect task called *name* of a function that takes the run, and have *title* name each of its runs at its end.

    The task takes the job's name, since Prefect searches parameters for futures, and a run is large. Its result is the
    `Transition`; none where the controller was told to detach from its job meanwhile.
    """

    def decorate(work: Work) -> Step:
        @task(name=name, task_run_name=name, cache_policy=NO_CACHE, retries=0, persist_result=False, description=work.__doc__)
        def run_step(job: str) -> TaskState[Transition | None]:
            run, begin = registry.of(job), time.monotonic()
            try:
                turn = work(run)
            except HandedOver as error:
                return Completed(name="Detached", message=f"training continues: {error.why}")
            rename(title(run, turn, time.monotonic() - begin))
            return Completed(name=STATE_NAMES.get(turn.event, turn.event.capitalize()), message=turn.reason, data=turn)

        return run_step

    return decorate


def rename(title: str) -> None:
    """Name the task run that this is called in; the server learns it with the run's next state."""
    context = TaskRunContext.get()
    if context is not None:
        context.task_run.name = title
