"""The life of a job: one table of states and moves. What it does not list is refused; the docs draw their diagram from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


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


MOVES: Final[dict[tuple[State, Event], State]] = {
    (State.LAUNCHING, Event.STARTED): State.RUNNING,
    (State.LAUNCHING, Event.FAULTED): State.DIAGNOSING,
    (State.LAUNCHING, Event.FINISHED): State.COMPLETED,
    (State.LAUNCHING, Event.GAVE_UP): State.FAILED,
    (State.LAUNCHING, Event.STOP_ASKED): State.CANCELLED,
    (State.LAUNCHING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.LAUNCHING, Event.TIME_OVER): State.CANCELLED,
    (State.RUNNING, Event.FAULTED): State.DIAGNOSING,
    (State.RUNNING, Event.FINISHED): State.COMPLETED,
    (State.RUNNING, Event.STOP_ASKED): State.CANCELLED,
    (State.RUNNING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.RUNNING, Event.TIME_OVER): State.CANCELLED,
    (State.RUNNING, Event.MOVE_ASKED): State.MIGRATING,
    (State.MIGRATING, Event.MOVED): State.RUNNING,
    (State.MIGRATING, Event.MOVE_FAILED): State.RUNNING,
    (State.MIGRATING, Event.FAULTED): State.DIAGNOSING,
    (State.MIGRATING, Event.FINISHED): State.COMPLETED,
    (State.MIGRATING, Event.STOP_ASKED): State.CANCELLED,
    (State.MIGRATING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.MIGRATING, Event.TIME_OVER): State.CANCELLED,
    (State.DIAGNOSING, Event.DISMISSED): State.RUNNING,
    (State.DIAGNOSING, Event.DIAGNOSED): State.DECIDING,
    (State.DIAGNOSING, Event.STOP_ASKED): State.CANCELLED,
    (State.DIAGNOSING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.DECIDING, Event.DECIDED): State.ISOLATING,
    (State.DECIDING, Event.ASKED): State.WAITING,
    (State.DECIDING, Event.GAVE_UP): State.FAILED,
    (State.DECIDING, Event.FAULTED): State.DIAGNOSING,
    (State.DECIDING, Event.STOP_ASKED): State.CANCELLED,
    (State.DECIDING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.ISOLATING, Event.ISOLATED): State.RESCHEDULING,
    (State.ISOLATING, Event.FAULTED): State.DIAGNOSING,
    (State.ISOLATING, Event.STOP_ASKED): State.CANCELLED,
    (State.ISOLATING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.RESCHEDULING, Event.PLACED): State.RESUMING,
    (State.RESCHEDULING, Event.SHORT): State.WAITING,
    (State.RESCHEDULING, Event.FAULTED): State.DIAGNOSING,
    (State.RESCHEDULING, Event.STOP_ASKED): State.CANCELLED,
    (State.RESCHEDULING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.RESUMING, Event.STARTED): State.RUNNING,
    (State.RESUMING, Event.FINISHED): State.COMPLETED,
    (State.RESUMING, Event.FAULTED): State.DIAGNOSING,
    (State.RESUMING, Event.STOP_ASKED): State.CANCELLED,
    (State.RESUMING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.RESUMING, Event.TIME_OVER): State.CANCELLED,
    (State.WAITING, Event.GAINED): State.RESCHEDULING,
    (State.WAITING, Event.ANSWERED): State.DIAGNOSING,
    (State.WAITING, Event.FINISHED): State.COMPLETED,
    (State.WAITING, Event.FAULTED): State.DIAGNOSING,
    (State.WAITING, Event.STOP_ASKED): State.CANCELLED,
    (State.WAITING, Event.SUSPEND_ASKED): State.SUSPENDED,
    (State.WAITING, Event.TIME_OVER): State.CANCELLED,
    (State.SUSPENDED, Event.RESUME_ASKED): State.LAUNCHING,
    (State.SUSPENDED, Event.STOP_ASKED): State.CANCELLED,
}

TERMINAL: Final = frozenset(State) - {state for state, _ in MOVES}
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
        return MOVES[state, event]
    except KeyError:
        raise UnlistedMove(state, event) from None
