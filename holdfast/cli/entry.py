"""The way in: every end of a command becomes an exit status, and every mistake a person can mend one message."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Final

import click

from holdfast.cli.grammar import NobodyReads, app
from holdfast.errors import OperatorError, RowCorrupt
from holdfast.log import line

REFUSED: Final = 2
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
    try:
        status = app.main(arguments, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 (what is a bug of ours is raised again)
        return _failed(error)
    return status if isinstance(status, int) else 0


def _failed(error: Exception) -> int:
    """Tell why a command failed and return its exit status; raise what nobody but us can mend."""
    match error:
        case click.ClickException():
            error.show()
            return error.exit_code
        case OperatorError():
            return _refused(str(error))
        case NobodyReads():
            return _unheard()
        case OSError():
            return _foreign(error)
    if (damaged := _damage()) is not None:  # whoever read it may have fallen over it
        return _refused(f"{damaged} ({type(error).__name__}: {str(error)[:SHOWN]})")
    raise error


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
        return history.damage()
    except OperatorError:
        return None
    finally:
        history.close()


def _foreign(error: OSError) -> int:
    """Tell what the system refused; an output that nobody reads any more needs no words."""
    if isinstance(error, BrokenPipeError) or error.errno == errno.EIO:
        return _unheard()
    return _refused(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")


def _refused(message: str) -> int:
    try:
        click.echo(line("refused", f"holdfast: {message}", level="error"), err=True)
        sys.stdout.flush()
    except OSError:  # nowhere left to say it
        _silence()
    return REFUSED


def _unheard() -> int:
    _silence()
    return NOBODY_LISTENS


def _silence() -> None:
    """Point both outputs nowhere: the interpreter flushes them at its end, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
