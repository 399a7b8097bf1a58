"""Foreign errors of databases, named for what a person can do about them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, ProgrammingError, StatementError

from holdfast.errors import HistoryCorrupt, HistoryLocked, HistoryTrouble, HistoryUnreachable, NotWritable, OperatorError

_SQLITE: Final[tuple[tuple[tuple[str, ...], type[OperatorError]], ...]] = (
    (("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL"), HistoryLocked),
    (("SQLITE_CORRUPT", "SQLITE_NOTADB"), HistoryCorrupt),
    (("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_PERM", "SQLITE_IOERR", "SQLITE_AUTH"), NotWritable),
)
"""Beginnings of SQLite's error names (https://www.sqlite.org/rescode.html)."""

_POSTGRESQL: Final[tuple[tuple[tuple[str, ...], type[OperatorError]], ...]] = (
    (("55P03", "40P01"), HistoryLocked),
    (("XX001", "XX002", "42P01", "42P07", "42703"), HistoryCorrupt),
    (("42501", "25006", "53100"), NotWritable),
)
"""Beginnings of PostgreSQL's SQLSTATEs (https://www.postgresql.org/docs/current/errcodes-appendix.html)."""


def trouble(url: str, error: Exception) -> OperatorError | None:
    """Return what *error*, raised by the database at *url*, means for a person; nothing when it is a bug of ours."""
    root = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    kind = _kind(root)
    if kind is None:
        if isinstance(error, ProgrammingError):
            return None
        kind = HistoryUnreachable
    reason = (str(root).strip().splitlines() or [type(root).__name__])[0].rstrip(".")
    return NotWritable("the history", url, reason) if kind is NotWritable else kind(url, reason)


def _kind(root: BaseException) -> type[OperatorError] | None:
    """Return the class of our error for the driver's error *root*, if we know it."""
    if isinstance(root, sqlite3.Error):
        code, table = getattr(root, "sqlite_errorname", None) or "", _SQLITE
        if "no such table" in str(root) or "no such column" in str(root):
            return HistoryCorrupt
    else:
        code, table = getattr(root, "sqlstate", None) or "", _POSTGRESQL
    return next((kind for beginnings, kind in table if code.startswith(beginnings)), None)


def refuses_the_row(error: Exception) -> bool:
    """Tell whether the database is well and refuses what it was given: trying again would change nothing."""
    if isinstance(error, (IntegrityError, DataError)):
        return True
    if isinstance(error, DBAPIError):
        # A driver that cannot write a Python value says so without a code of the database.
        code = getattr(error.orig, "sqlite_errorname", None) or getattr(error.orig, "sqlstate", None)
        return code is None and not isinstance(error, OperationalError) and not error.connection_invalidated
    return isinstance(error, (StatementError, TypeError, ValueError, OverflowError))


def may_pass(error: HistoryTrouble) -> bool:
    """Tell whether *error* may be over by itself: the database is away or busy, and not misnamed, damaged or of another version."""
    return isinstance(error, HistoryLocked) or (
        isinstance(error, HistoryUnreachable) and isinstance(error.__cause__, (DBAPIError, sqlite3.Error))
    )


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn what the database at *url* raises into errors of ours; errors that are bugs of ours go through untouched."""
    try:
        yield
    except (DBAPIError, sqlite3.Error) as error:
        meant = None if refuses_the_row(error) else trouble(url, error)
        if meant is None:
            raise
        raise meant from error
