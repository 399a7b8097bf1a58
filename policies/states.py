"""The states of a job and the transitions between them, in one table, from which docs/reference/states.md is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple


class State(StrEnum):
    """State of a job."""

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
    """What moves a job to its next state."""

    STARTED = "started"
    """All workers run, and all that report steps have finished their first one."""
    FINISHED = "finished"
    """All workers exited with success."""
    FAULTED = "faulted"
    """A fault was seen that needs a diagnosis."""
    DISMISSED = "dismissed"
    """The diagnosis found nothing to act on."""
    DIAGNOSED = "diagnosed"
    """The root cause is known as far as the evidence goes."""
    DECIDED = "decided"
    """A policy chose a recovery action."""
    ISOLATED = "isolated"
    """The ranks have stopped and the faulty nodes are released."""
    PLACED = "placed"
    """A new membership is agreed."""
    SHORT = "short"
    """There are fewer healthy nodes than the job can use."""
    GAINED = "gained"
    """There are enough nodes again."""
    ASKED = "asked"
    """An approval is needed before nodes are isolated."""
    ANSWERED = "answered"
    """The approval was answered, expired, or is no longer needed as it was."""
    FAILED = "failed"
    """No recovery action is left, or the script is at fault."""
    MOVE_ASKED = "move-asked"
    """Ranks migrate while training runs: on request, from a drained node, away from a straggler; or missing ranks can be added."""
    MOVED = "moved"
    """The ranks migrated or were added between two steps; or all ranks restarted on more nodes."""
    MOVE_FAILED = "move-failed"
    """The migration was cancelled before it changed anything."""
    STOP_ASKED = "stop-asked"
    """A person requested that the job stops."""
    SUSPEND_ASKED = "suspend-asked"
    """A person suspended the job in Prefect: it is saved and its nodes are released until it is resumed."""
    RESUME_ASKED = "resume-asked"
    """A suspended job was resumed: it is launched on fresh nodes from its checkpoint."""
    TIME_OVER = "time-over"
    """The walltime of the job or of its allocation is nearly over, or all its nodes are being removed: it is saved and can be run again."""


class Transition(NamedTuple):
    """Result of a task of the state machine: an event and its reason."""

    event: Event
    reason: str


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.LAUNCHING: {
        Event.STARTED: State.RUNNING,
        Event.FAULTED: State.DIAGNOSING,
        Event.FINISHED: State.COMPLETED,
        Event.FAILED: State.FAILED,
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
        Event.FAILED: State.FAILED,
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
"""State to its possible events and the next state for each. `flows/training_job.py` says which task runs in a state."""

TERMINAL: Final = frozenset(State) - TRANSITIONS.keys()
"""States without a transition."""


class UnlistedTransition(ValueError):
    """A transition that the table does not list: a bug, never an operator's error."""

    def __init__(self, state: StrEnum, event: StrEnum) -> None:
        super().__init__(state, event)
        self.state, self.event = state, event

    def __str__(self) -> str:
        return f"no transition from {self.state} on '{self.event}'"


def advance(state: State, event: Event) -> State:
    """Return the state after *event*; raise `UnlistedTransition` if the table does not list it."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise UnlistedTransition(state, event) from None
