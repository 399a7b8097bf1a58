"""Exit codes of `holdfast` commands and of a job's controller, by which scripts and service managers decide.

`CODES` is the table from which docs/reference/exit-codes.md is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.history.models import JobTransition

SUCCESS: Final = 0
FAILED: Final = 1
OPERATOR_ERROR: Final = 2
STOPPED: Final = 3
CONTROLLER_DIED: Final = 4
TIME_OVER: Final = 5
DETACHED: Final = 6
SUSPENDED: Final = 7
NOT_SAVED: Final = 8
INTERRUPTED: Final = 130
"""As shells count SIGINT."""
BROKEN_PIPE: Final = 141
"""As shells count SIGPIPE."""
WARNINGS: Final = 3
"""Of `node preflight` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCode:
    """What an exit code means for the commands that match *commands*, and what a script does about it."""

    code: int
    commands: str
    meaning: str
    next: str = ""


CODES: Final = (
    ExitCode(code=SUCCESS, commands="all", meaning="Success. `run`, `status --follow`: the job is COMPLETED."),
    ExitCode(
        code=FAILED,
        commands="run, status --follow",
        meaning="The job is FAILED: no recovery is possible, or its limits are reached.",
        next="`holdfast incidents show N` has the reason; the same `holdfast run` continues from the newest checkpoint.",
    ),
    ExitCode(
        code=FAILED,
        commands="stop, detach, node migrate",
        meaning="What was requested did not happen within `--timeout`, or not at all.",
        next="The request stays in force, except where the message says that nothing was moved.",
    ),
    ExitCode(
        code=FAILED, commands="node check", meaning="A node is not healthy, or its health is unknown; with `--local`: a fault was found."
    ),
    ExitCode(
        code=FAILED, commands="node preflight", meaning="A node lacks something that the job needs.", next="Each problem has its cure."
    ),
    ExitCode(code=FAILED, commands="node burn-in", meaning="A node did not pass, or could not be tested."),
    ExitCode(code=FAILED, commands="node trust", meaning="A host key is not trusted."),
    ExitCode(code=FAILED, commands="node bootstrap", meaning="A host could not be set up."),
    ExitCode(
        code=FAILED, commands="checkpoint ls, checkpoint verify", meaning="The newest of a tier is incomplete, or something is damaged."
    ),
    ExitCode(code=FAILED, commands="logs", meaning="A node could not be read."),
    ExitCode(code=FAILED, commands="demo", meaning="The two runs are not bit-equal, or a fault was not recovered."),
    ExitCode(
        code=OPERATOR_ERROR,
        commands="all",
        meaning="An error that you can fix: a wrong option, a file with problems, an unknown job or node, a history that cannot be read.",
        next="The message says what, where, and what to do. Nothing was started.",
    ),
    ExitCode(
        code=STOPPED, commands="run, status --follow", meaning="The job is CANCELLED: a person stopped it.", next="Do not restart it."
    ),
    ExitCode(code=WARNINGS, commands="node preflight", meaning="Jobs can run, but something should be fixed."),
    ExitCode(
        code=CONTROLLER_DIED,
        commands="run, status --follow",
        meaning="The controller died, and training continues.",
        next="Run the same command: it reattaches to the job.",
    ),
    ExitCode(
        code=TIME_OVER,
        commands="run, status --follow",
        meaning="A final checkpoint is saved, as the job's time is over or its nodes are preempted.",
        next="Run the same command: it continues from there. A batch script requeues itself.",
    ),
    ExitCode(
        code=DETACHED,
        commands="run",
        meaning="The controller detached from the job as requested, and training continues.",
        next="A standby controller takes over, or the same command reattaches.",
    ),
    ExitCode(
        code=SUSPENDED,
        commands="run, status --follow",
        meaning="The job was suspended in Prefect: it is saved and its nodes are released.",
        next="Resume it in Prefect, or with the same command.",
    ),
    ExitCode(
        code=NOT_SAVED,
        commands="run, status --follow",
        meaning="The job is COMPLETED, and its final state could not be saved.",
        next="Mend what the message names; the same command then repeats the steps after the newest checkpoint.",
    ),
    ExitCode(code=INTERRUPTED, commands="all", meaning="Ctrl-C."),
    ExitCode(code=BROKEN_PIPE, commands="all", meaning="The reader of the output exited (`| head`), or the terminal was closed."),
)
"""Every exit code, ascending."""


def status_of(move: JobTransition | None, *, lost_end: bool) -> int:
    """Return the exit code for a job's newest transition; while it is not terminal, the job lost its controller.

    *lost_end*: the job has ended, and the save of its last step failed.
    """
    from holdfast.policies.states import Event, State  # noqa: PLC0415 (most commands need only the numbers)

    if move is None:
        return CONTROLLER_DIED
    if move.event == Event.TIME_OVER:
        return TIME_OVER
    ends = {State.COMPLETED: NOT_SAVED if lost_end else SUCCESS, State.FAILED: FAILED, State.CANCELLED: STOPPED, State.SUSPENDED: SUSPENDED}
    return ends.get(State(move.after), CONTROLLER_DIED)
