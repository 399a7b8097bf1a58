"""How a flow, and the command that watches it, ends: the exit statuses that scripts and service managers decide by."""

from __future__ import annotations

from typing import Final

from holdfast.history.models import JobTransition
from policies.states import Event, State

FAILED: Final = 1
OPERATOR_ERROR: Final = 2
"""Something to mend; the message says what."""
STOPPED: Final = 3
"""Somebody asked the job to stop."""
CONTROLLER_DIED: Final = 4
"""The flow died, and training goes on: the same command adopts the job."""
TIME_OVER: Final = 5
"""The job is saved, as its time is over or its nodes go: the same command goes on from there."""
DETACHED: Final = 6
"""The flow was told to let go of the job, which trains on: a standby, or the same command, adopts it."""
SUSPENDED: Final = 7
"""The job was suspended in Prefect: it is saved and its nodes are released. Resume it there, or by the same command."""
INTERRUPTED: Final = 130


def status_of(move: JobTransition | None) -> int:
    """Return the exit status that a job's newest move asks for; while none has ended it, its flow is what is gone."""
    if move is None:
        return CONTROLLER_DIED
    if move.event == Event.TIME_OVER:
        return TIME_OVER
    ends = {State.COMPLETED: 0, State.FAILED: FAILED, State.CANCELLED: STOPPED, State.SUSPENDED: SUSPENDED}
    return ends.get(State(move.after), CONTROLLER_DIED)
