"""Foreign errors of databases, named for what a person can do about them."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, ProgrammingError, StatementError

from holdfast.errors import (
    HistoryAccessDenied,
    HistoryCorrupt,
    HistoryError,
    HistoryLocked,
    HistoryTooManyConnections,
    HistoryUnreachable,
    NotWritable,
    OperatorError,
)

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
    (("53300",), HistoryTooManyConnections),
)
"""Beginnings of PostgreSQL's SQLSTATEs (https://www.postgresql.org/docs/current/errcodes-appendix.html)."""
_FULL: Final = re.compile(r"too many (?:clients|connections)|remaining connection slots")
"""How it says 53300 to who wants to connect: libpq tells them no SQLSTATE."""
_MEND: Final = "in HOLDFAST_HISTORY"
_REFUSALS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(said), cure)
    for said, cure in (
        # of a role that is not there too, where passwords are asked for: a server tells strangers no names
        (r"password authentication failed for user", f"Mend the password or the user {_MEND}, or give that role a password by ALTER ROLE"),
        (r"no password supplied", f"Give the password {_MEND} (user:password@host), in PGPASSWORD or in ~/.pgpass"),
        (r"(?:Peer|Ident) authentication failed for user", f"Run as that user, name another one {_MEND}, or let it in by pg_hba.conf"),
        (r'role "[^"]*" does not exist', f"Mend the user {_MEND}, or make that role by CREATE ROLE ... LOGIN"),
        (r'role "[^"]*" is not permitted to log in', f"Mend the user {_MEND}, or let it log in by ALTER ROLE ... LOGIN"),
        (r'database "[^"]*" does not exist', f"Mend the name of the database {_MEND}, or make that one by CREATE DATABASE"),
        (r"permission denied for database", f"Name another database {_MEND}, or let that role in by GRANT CONNECT"),
        (r"(?:no pg_hba\.conf entry|pg_hba\.conf rejects connection) for", "Let this host, user and database in by a line in pg_hba.conf"),
    )
)
"""How it says 28000, 28P01 and 3D000 to who wants to connect, in English, and what helps. In other words it is unreachable, as it says."""


def trouble(url: str, error: Exception) -> OperatorError | None:
    """Return what *error*, raised by the database at *url*, means for a person; nothing when it is a bug of ours."""
    root = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    if isinstance(error, OperationalError) and not isinstance(root, sqlite3.Error) and (refused := _refusal(url, str(root))) is not None:
        return refused
    kind = _kind(root)
    if kind is None:
        if isinstance(error, ProgrammingError):
            return None
        kind = HistoryUnreachable
    reason = (str(root).strip().splitlines() or [type(root).__name__])[0].rstrip(".")
    return NotWritable("the history", url, reason) if kind is NotWritable else kind(url, reason)


def _refusal(url: str, said: str) -> HistoryAccessDenied | None:
    """Return what it means that a server does not let us in; nothing when it said nothing of the kind."""
    for line in said.splitlines():
        words = line.partition("FATAL:")[2].strip() or line.strip()
        for pattern, cure in _REFUSALS:
            if pattern.search(words):
                return HistoryAccessDenied(url, words, cure)
    return None


def _kind(root: BaseException) -> type[OperatorError] | None:
    """Return the class of our error for the driver's error *root*, if we know it."""
    if isinstance(root, sqlite3.Error):
        code, table = getattr(root, "sqlite_errorname", None) or "", _SQLITE
        if any(words in str(root) for words in ("no such table", "no such column", "Could not decode to UTF-8")):
            return HistoryCorrupt
    else:
        code, table = getattr(root, "sqlstate", None) or "", _POSTGRESQL
        if not code and _FULL.search(str(root)):
            return HistoryTooManyConnections
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


def is_transient(error: HistoryError) -> bool:
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
