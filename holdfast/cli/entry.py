"""Run the command line: every outcome becomes an exit status, and every error that the user can fix one message."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Final

import click

from holdfast.cli.parser import OutputClosed, app
from holdfast.errors import OperatorError, RowCorrupt, cut
from holdfast.exit_codes import BROKEN_PIPE, INTERRUPTED, OPERATOR_ERROR
from holdfast.log import line

MAX_SHOWN: Final = 200
"""Characters of a foreign error that a message repeats."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    _open_closed_outputs()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows `?`, not a traceback
    given = sys.argv[1:] if arguments is None else arguments
    try:
        status = app.main(given, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (what the user cannot fix is raised again)
        return _ended_by(error, given)
    return status if isinstance(status, int) else 0


def _ended_by(error: BaseException, given: Sequence[str]) -> int:
    """Return the exit status of a command that ended with *error*, and write the message, if any."""
    match error:
        case click.ClickException():
            error.show()
            return error.exit_code
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
        case OutputClosed():
            return _output_closed()
        case OSError():
            if isinstance(error, BrokenPipeError) or error.errno == errno.EIO:
                return _output_closed()
            return _refused(f"{error.strerror or error}{f': {cut(str(error.filename))}' if error.filename else ''}")
    return _refused(_message_for(error, given))


def _message_for(error: BaseException, given: Sequence[str]) -> str:
    """Return the message for the user about *error*; raise it again if it is a bug of ours."""
    match error:
        case OperatorError():
            return str(error)
        case UnicodeEncodeError() if invalid := next((one for one in given if any("\ud800" <= letter <= "\udfff" for letter in one)), None):
            return f"{invalid[:80]!a} is not UTF-8: it cannot name a job, a node, a policy or a file"
    if (damaged := _damage()) is not None:  # it may have caused the error
        return f"{damaged} ({type(error).__name__}: {str(error)[:MAX_SHOWN]})"
    raise error


def _open_closed_outputs() -> None:
    """Open ``/dev/null`` for outputs with which the process was not started (`>&-`, some daemons): they are None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def _damage() -> RowCorrupt | None:
    """Return a damaged row of the history, if there is one."""
    from holdfast.history.store import History  # noqa: PLC0415 (most commands need no database)

    try:
        history = History.open(create=False)
    except OperatorError:
        return None
    with closing(history), suppress(OperatorError):
        return history.find_corrupt_row()
    return None


def _refused(message: str) -> int:
    try:
        click.echo(line("refused", f"holdfast: {message}", level="error"), err=True)
        sys.stdout.flush()
    except OSError:  # there is no output for the message
        _silence()
    return OPERATOR_ERROR


def _output_closed() -> int:
    _silence()
    return BROKEN_PIPE


def _silence() -> None:
    """Redirect both outputs to ``/dev/null``: the interpreter flushes them at exit, and would report an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
