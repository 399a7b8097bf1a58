"""The way in: every end of a command becomes an exit status, and every mistake a person can mend one message."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from holdfast.cli.grammar import NobodyReads, app
from holdfast.errors import OperatorError, RowCorrupt, cut
from holdfast.log import line

OPERATOR_ERROR: Final = 2
"""Something that a person can mend."""
INTERRUPTED: Final = 130
"""Ctrl-C, as shells count it."""
SHOWN: Final = 200
NOBODY_LISTENS: Final = 141
"""Who read our output went away (`| head`), or the terminal did; as shells count SIGPIPE."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows `?`, not a traceback
    given = sys.argv[1:] if arguments is None else arguments
    try:
        status = app.main(given, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (what is no person's mistake is raised again)
        return _ended_by(error, given)
    return status if isinstance(status, int) else 0


def _ended_by(error: BaseException, given: Sequence[str]) -> int:
    """Return the exit status of a command that ended by *error*, and say what there is to say."""
    match error:
        case click.ClickException():
            error.show()
            return error.exit_code
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
        case NobodyReads():
            return _unheard()
        case OSError():
            return _foreign(error)
    return _refused(_what_to_mend(error, given))


def _what_to_mend(error: BaseException, given: Sequence[str]) -> str:
    """Return what a person can mend about *error*; raise what is a bug of ours."""
    match error:
        case OperatorError():
            return str(error)
        case UnicodeEncodeError() if strange := next((one for one in given if not _is_text(one)), None):
            return f"{strange[:80]!a} is not UTF-8: no job, node or policy is called so, and no file of theirs can be"
    if (damaged := _damage()) is not None:  # whoever read it may have fallen over it
        return f"{damaged} ({type(error).__name__}: {str(error)[:SHOWN]})"
    raise error


def _is_text(word: str) -> bool:
    """Tell whether *word* can be written as UTF-8: an argument may be any bytes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def _open_what_is_closed() -> None:
    """Give a process that was started without an output (`>&-`, some daemons) one that leads nowhere: it is None else."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def _damage() -> RowCorrupt | None:
    """Return the row of the history that cannot be what was written, where there is one."""
    from holdfast.history.store import History  # noqa: PLC0415 (most commands need no database)

    try:
        history = History.open(create=False)
    except OperatorError:
        return None
    try:
        return history.find_corrupt_row()
    except OperatorError:
        return None
    finally:
        history.close()


def _foreign(error: OSError) -> int:
    """Tell what the system refused; an output that nobody reads any more needs no words."""
    if isinstance(error, BrokenPipeError) or error.errno == errno.EIO:
        return _unheard()
    return _refused(f"{error.strerror or error}{f': {cut(str(error.filename))}' if error.filename else ''}")


def _refused(message: str) -> int:
    try:
        click.echo(line("refused", f"holdfast: {message}", level="error"), err=True)
        sys.stdout.flush()
    except OSError:  # nowhere left to say it
        _silence()
    return OPERATOR_ERROR


def _unheard() -> int:
    _silence()
    return NOBODY_LISTENS


def _silence() -> None:
    """Point both outputs nowhere: the interpreter flushes them at its end, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
