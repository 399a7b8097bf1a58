"""The life of a job: one table of states and transitions. What it does not list is refused; the docs draw their diagram from it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple


class State(StrEnum):
    """Where a job is in its life."""

    LAUNCHING = "LAUNCHING"
    RUNNING = "RUNNING"
    DIAGNOSING = "DIAGNOSING"
    DECIDING = "DECIDING"
    ISOLATING = "ISOLATING"
    RESCHEDULING = "RESCHEDULING"
    RESUMING = "RESUMING"
    WAITING = "WAITING"
    MIGRATING = "MIGRATING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Event(StrEnum):
    """What moves a job on."""

    STARTED = "started"
    """Every worker runs, and every one known to report steps made its first."""
    FINISHED = "finished"
    """Every worker ended well."""
    FAULTED = "faulted"
    """A symptom was seen that somebody has to explain."""
    DISMISSED = "dismissed"
    """The diagnosis found nothing to act on."""
    DIAGNOSED = "diagnosed"
    """The root cause is named, as far as the evidence goes."""
    DECIDED = "decided"
    """A policy chose a recovery action."""
    ISOLATED = "isolated"
    """Every rank has stopped and the faulty nodes are out."""
    PLACED = "placed"
    """A new membership is agreed."""
    SHORT = "short"
    """There are fewer healthy nodes than the job can use."""
    GAINED = "gained"
    """Enough nodes are back."""
    ASKED = "asked"
    """A person has to say whether nodes may be isolated."""
    ANSWERED = "answered"
    """A person has said so, or nobody has in time, or what was asked for has changed."""
    GAVE_UP = "gave-up"
    """No action is left, or the job is the user's to mend."""
    MOVE_ASKED = "move-asked"
    """Ranks are to move while training runs: a person asked, a node is left, one holds others up; or missing ranks can come again."""
    MOVED = "moved"
    """The ranks that were to move or to come have done so between two steps; or all have started again, to be more."""
    MOVE_FAILED = "move-failed"
    """The move was given up before it changed anything."""
    STOP_ASKED = "stop-asked"
    """A person asked the job to stop."""
    SUSPEND_ASKED = "suspend-asked"
    """A person suspended the job in Prefect: it is saved, its nodes are released, and the same job continues when it is resumed."""
    RESUME_ASKED = "resume-asked"
    """A suspended job was started again: it is launched on fresh nodes, from what was saved."""
    TIME_OVER = "time-over"
    """The walltime of the job or of its allocation is nearly over, or all its nodes are about to go: saved, it can be run again."""


class Transition(NamedTuple):
    """What a task of the state machine returns: the event that moves the job on, and why."""

    event: Event
    reason: str


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.LAUNCHING: {
        Event.STARTED: State.RUNNING,
        Event.FAULTED: State.DIAGNOSING,
        Event.FINISHED: State.COMPLETED,
        Event.GAVE_UP: State.FAILED,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
        Event.TIME_OVER: State.CANCELLED,
    },
    State.RUNNING: {
        Event.FAULTED: State.DIAGNOSING,
        Event.FINISHED: State.COMPLETED,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
        Event.TIME_OVER: State.CANCELLED,
        Event.MOVE_ASKED: State.MIGRATING,
    },
    State.MIGRATING: {
        Event.MOVED: State.RUNNING,
        Event.MOVE_FAILED: State.RUNNING,
        Event.FAULTED: State.DIAGNOSING,
        Event.FINISHED: State.COMPLETED,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
        Event.TIME_OVER: State.CANCELLED,
    },
    State.DIAGNOSING: {
        Event.DISMISSED: State.RUNNING,
        Event.DIAGNOSED: State.DECIDING,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
    },
    State.DECIDING: {
        Event.DECIDED: State.ISOLATING,
        Event.ASKED: State.WAITING,
        Event.GAVE_UP: State.FAILED,
        Event.FAULTED: State.DIAGNOSING,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
    },
    State.ISOLATING: {
        Event.ISOLATED: State.RESCHEDULING,
        Event.FAULTED: State.DIAGNOSING,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
    },
    State.RESCHEDULING: {
        Event.PLACED: State.RESUMING,
        Event.SHORT: State.WAITING,
        Event.FAULTED: State.DIAGNOSING,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
    },
    State.RESUMING: {
        Event.STARTED: State.RUNNING,
        Event.FINISHED: State.COMPLETED,
        Event.FAULTED: State.DIAGNOSING,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
        Event.TIME_OVER: State.CANCELLED,
    },
    State.WAITING: {
        Event.GAINED: State.RESCHEDULING,
        Event.ANSWERED: State.DIAGNOSING,
        Event.FINISHED: State.COMPLETED,
        Event.FAULTED: State.DIAGNOSING,
        Event.STOP_ASKED: State.CANCELLED,
        Event.SUSPEND_ASKED: State.SUSPENDED,
        Event.TIME_OVER: State.CANCELLED,
    },
    State.SUSPENDED: {
        Event.RESUME_ASKED: State.LAUNCHING,
        Event.STOP_ASKED: State.CANCELLED,
    },
}
"""State to what may happen in it, and where each outcome leads. Which task brings the outcomes about: `flows/training_job.py`."""

TERMINAL: Final = frozenset(State) - TRANSITIONS.keys()
"""States that nothing leaves: computed, never listed."""


class UnlistedMove(ValueError):
    """A move that the table does not list: ours to mend, never the operator's."""

    def __init__(self, state: StrEnum, event: StrEnum) -> None:
        super().__init__(state, event)
        self.state, self.event = state, event

    def __str__(self) -> str:
        return f"no move from {self.state} on '{self.event}'"


def advance(state: State, event: Event) -> State:
    """Return where *event* takes a job; refuse what the table does not list."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise UnlistedMove(state, event) from None
