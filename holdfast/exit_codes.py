"""Exit statuses of `holdfast` commands and of a job's flow, by which scripts and service managers decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.history.models import JobTransition

FAILED: Final = 1
"""The job failed, or a check found a problem."""
OPERATOR_ERROR: Final = 2
"""An error that you can fix, such as a wrong argument or a file with mistakes. The message says what to do."""
STOPPED: Final = 3
"""A person stopped the job."""
CONTROLLER_DIED: Final = 4
"""The controller died, and training continues: the same command reattaches to the job."""
TIME_OVER: Final = 5
"""A final checkpoint was saved, as the job's time is over or its nodes are preempted: the same command continues from there."""
DETACHED: Final = 6
"""The controller detached from the job as requested, and training continues: a standby, or the same command, reattaches."""
SUSPENDED: Final = 7
"""The job was suspended in Prefect: it is saved and its nodes are released. Resume it there, or with the same command."""
INTERRUPTED: Final = 130
"""Ctrl-C, as shells count it."""
BROKEN_PIPE: Final = 141
"""The reader of our output exited (`| head`), or the terminal was closed; as shells count SIGPIPE."""


def status_of(move: JobTransition | None) -> int:
    """Return the exit status for a job's newest transition; while it is not terminal, the job lost its controller."""
    from policies.states import Event, State  # noqa: PLC0415 (most commands need only the numbers)

    if move is None:
        return CONTROLLER_DIED
    if move.event == Event.TIME_OVER:
        return TIME_OVER
    ends = {State.COMPLETED: 0, State.FAILED: FAILED, State.CANCELLED: STOPPED, State.SUSPENDED: SUSPENDED}
    return ends.get(State(move.after), CONTROLLER_DIED)
