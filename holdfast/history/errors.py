"""Errors of the databases as errors of ours that name what a user can do, corrupt rows, and retries while a database is unreachable."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar, get_origin

from sqlalchemy import JSON, Boolean, Column, Connection, Engine, Float, Integer, Table, column, select, table, text
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError, StatementError

from holdfast.errors import (
    HistoryAccessDenied,
    HistoryCorrupt,
    HistoryError,
    HistoryLocked,
    HistoryTooManyConnections,
    HistoryUnreachable,
    NotWritable,
    OperatorError,
    RowCorrupt,
)
from holdfast.history import models
from holdfast.log import note

T = TypeVar("T")

log = logging.getLogger("holdfast.history")

_SQLITE: Final[tuple[tuple[tuple[str, ...], type[OperatorError]], ...]] = (
    (("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL"), HistoryLocked),
    (("SQLITE_CORRUPT", "SQLITE_NOTADB"), HistoryCorrupt),
    (("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_PERM", "SQLITE_IOERR", "SQLITE_AUTH"), NotWritable),
)
"""Prefixes of SQLite's error names (https://www.sqlite.org/rescode.html)."""

_POSTGRESQL: Final[tuple[tuple[tuple[str, ...], type[OperatorError]], ...]] = (
    (("55P03", "40P01"), HistoryLocked),
    (("XX001", "XX002", "42P01", "42P07", "42703"), HistoryCorrupt),
    (("42501", "25006", "53100"), NotWritable),
    (("53300",), HistoryTooManyConnections),
)
"""Prefixes of PostgreSQL's SQLSTATEs (https://www.postgresql.org/docs/current/errcodes-appendix.html)."""
_FULL: Final = re.compile(r"too many (?:clients|connections)|remaining connection slots")
"""Text of error 53300 on connection: libpq passes no SQLSTATE on."""
_SETTING: Final = "in HOLDFAST_HISTORY"
_REFUSALS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), action)
    for pattern, action in (
        # also the answer for a role that does not exist, if passwords are used: a server reveals no names
        (r"password authentication failed for user", f"Fix the password or the user {_SETTING}, or set that role's password by ALTER ROLE"),
        (r"no password supplied", f"Give the password {_SETTING} (user:password@host), in PGPASSWORD or in ~/.pgpass"),
        (r"(?:Peer|Ident) authentication failed for user", f"Run as that user, name another one {_SETTING}, or allow it in pg_hba.conf"),
        (r'role "[^"]*" does not exist', f"Fix the user {_SETTING}, or create that role by CREATE ROLE ... LOGIN"),
        (r'role "[^"]*" is not permitted to log in', f"Fix the user {_SETTING}, or allow it to log in by ALTER ROLE ... LOGIN"),
        (r'database "[^"]*" does not exist', f"Fix the name of the database {_SETTING}, or create it by CREATE DATABASE"),
        (r"permission denied for database", f"Name another database {_SETTING}, or allow that role by GRANT CONNECT"),
        (r"(?:no pg_hba\.conf entry|pg_hba\.conf rejects connection) for", "Allow this host, user and database by a line in pg_hba.conf"),
    )
)
"""English texts of 28000, 28P01 and 3D000 on connection, and what to do. In other languages the server counts as unreachable."""

RETRY_SECONDS: Final = 1.0
"""Between two attempts."""
MISREAD: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading a value raises that is not what its column should hold."""
_SHOWN: Final = 60
"""Characters of a corrupt value in a message."""


# -- errors of the driver -------------------------------------------------------------------------------------------------


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Raise errors of the database at *url* as errors of ours; errors that are our bugs pass unchanged."""
    try:
        yield
    except (DBAPIError, sqlite3.Error) as error:
        known = None if rejects_row(error) else translate(url, error)
        if known is None:
            raise
        raise known from error


def translate(url: str, error: Exception) -> OperatorError | None:
    """Return the error of ours for *error* of the database at *url*; None if it is a bug of ours."""
    root = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    if isinstance(error, OperationalError) and not isinstance(root, sqlite3.Error):
        for line in str(root).splitlines():
            message = line.partition("FATAL:")[2].strip() or line.strip()
            for pattern, action in _REFUSALS:
                if pattern.search(message):
                    return HistoryAccessDenied(url, message, action)
    kind = _error_class(root)
    if kind is None:
        if isinstance(error, ProgrammingError):
            return None
        kind = HistoryUnreachable
    reason = (str(root).strip().splitlines() or [type(root).__name__])[0].rstrip(".")
    return NotWritable("the history", url, reason) if kind is NotWritable else kind(url, reason)


def _error_class(root: BaseException) -> type[OperatorError] | None:
    """Return our class for the driver's error *root*, if there is one."""
    if isinstance(root, sqlite3.Error):
        code, known = getattr(root, "sqlite_errorname", None) or "", _SQLITE
        if any(part in str(root) for part in ("no such table", "no such column", "Could not decode to UTF-8")):
            return HistoryCorrupt
    else:
        code, known = getattr(root, "sqlstate", None) or "", _POSTGRESQL
        if not code and _FULL.search(str(root)):
            return HistoryTooManyConnections
    return next((kind for prefixes, kind in known if code.startswith(prefixes)), None)


def rejects_row(error: Exception) -> bool:
    """Return whether the database works and rejects the row that it was given: a retry would not help."""
    if isinstance(error, (IntegrityError, DataError)):
        return True
    if isinstance(error, DBAPIError):
        # a driver that cannot write a Python value reports it without a code of the database
        code = getattr(error.orig, "sqlite_errorname", None) or getattr(error.orig, "sqlstate", None)
        return code is None and not isinstance(error, OperationalError) and not error.connection_invalidated
    return isinstance(error, (StatementError, TypeError, ValueError, OverflowError))


def is_transient(error: HistoryError) -> bool:
    """Return whether *error* may resolve by itself: the database is unreachable or busy, but not misnamed, corrupt or incompatible."""
    return isinstance(error, HistoryLocked) or (
        isinstance(error, HistoryUnreachable) and isinstance(error.__cause__, (DBAPIError, sqlite3.Error))
    )


# -- retries --------------------------------------------------------------------------------------------------------------


def wait_for_history(act: Callable[[], T], on_wait: Callable[[HistoryError], None]) -> T:
    """Return the result of *act*; retry it while the database is unreachable or busy, and call *on_wait* once. Raise other errors."""
    waiting = False
    while True:
        try:
            return act()
        except HistoryError as error:
            if not is_transient(error):
                raise
            if not waiting:
                on_wait(error)
            waiting = True
        time.sleep(RETRY_SECONDS)


class RetryingHistory:
    """Runs periodic work on the history; logs once when the history becomes unreachable and once when it is reachable again."""

    def __init__(self, source: str, facts: Mapping[str, Any] | None = None) -> None:
        """Log events under the name *source*, with *facts*."""
        self._source, self._facts = source, dict(facts or {})
        self.is_away = False

    def __call__(self, act: Callable[[], None]) -> None:
        """Run *act*; log what it raises, and never raise."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 (an unreachable history is tried again; its caller must survive)
            if not self.is_away:
                note(log, f"{self._source}.history-unreachable", level=logging.WARNING, **self._facts, error=error)
            self.is_away = True
        else:
            if self.is_away:
                note(log, f"{self._source}.history-reachable", **self._facts)
            self.is_away = False


# -- corrupt rows ---------------------------------------------------------------------------------------------------------


def find_corrupt_row(engine: Engine, url: str) -> RowCorrupt | None:
    """Return the first row of the database at *url* with a value that no version of Holdfast writes; None without one.

    SQLite stores any value in any column, also after a flipped byte. PostgreSQL checks types itself, and that JSON is valid.
    """
    with suppress(SQLAlchemyError), engine.connect() as connection:
        for one in sorted(models.TABLES, key=lambda one: one.name == "step"):  # the longest table last
            for key, reason in _corrupt_rows(connection, one):
                return RowCorrupt(url, one.name, key, reason)
    return None


def _corrupt_rows(connection: Connection, of: Table) -> Iterator[tuple[str, str]]:
    """Yield the primary key of each corrupt row of a table, and the reason."""
    keys = [one.name for one in of.primary_key]
    for one in of.columns:
        name, json_kind = f'"{one.name}"', "array" if _is_list(one) else "object"
        condition = ""  # nothing else can be wrong on PostgreSQL
        if connection.dialect.name == "sqlite" and isinstance(one.type, JSON):
            condition = f"{name} IS NOT NULL AND CASE WHEN json_valid({name}) THEN json_type({name}) <> '{json_kind}' ELSE 1 END"
        elif connection.dialect.name == "sqlite":
            types = "'real', 'integer'" if _is_real(one) else "'integer'" if isinstance(one.type, (Integer, Boolean)) else "'text'"
            condition = f"typeof({name}) NOT IN ({types}, 'null')"
        elif isinstance(one.type, JSON):
            condition = f"json_typeof({name}) NOT IN ('{json_kind}', 'null')"
        if not condition:
            continue
        stored = table(of.name, *(column(name) for name in dict.fromkeys([*keys, one.name])))  # values as stored, without types
        query = select(*(stored.c[key] for key in keys), stored.c[one.name]).where(text(condition))
        for row in connection.execute(query):
            if reason := _flaw(one, row[-1]):
                key = str(row[0]) if len(keys) == 1 else ", ".join(f"{name} {value}" for name, value in zip(keys, row, strict=False))
                yield key, f"its column '{one.name}' holds {str(row[-1])[:_SHOWN]!r}, {reason}"


def _flaw(of: Column[Any], value: object) -> str:
    """Return what is wrong with a suspicious value; empty if Python can read it, as for NaN."""
    try:
        if isinstance(of.type, JSON):
            found = json.loads(value) if isinstance(value, str | bytes) else value
            wanted: type = list if _is_list(of) else dict
            is_valid = isinstance(found, wanted) or (found is None and of.nullable)
            return "" if is_valid else f"which is no {'list' if wanted is list else 'object'}"
        if isinstance(of.type, models.Real):
            float(str(value))
            return ""
    except (ValueError, RecursionError) as error:
        return f"which cannot be read ({error})"
    return f"which is no {'number' if _is_real(of) or isinstance(of.type, (Integer, Boolean)) else 'text'}"


def _is_real(of: Column[Any]) -> bool:
    return isinstance(of.type, (Float, models.Real))


def _is_list(of: Column[Any]) -> bool:
    """Return whether rows hold a list there; all other JSON is an object."""
    return get_origin(models.FIELDS[of.table.name, of.name]) is list
