"""The history in a PostgreSQL database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from holdfast.errors import HistoryUnreachable
from holdfast.history.sanitize import to_json

_ANSWER_WITHIN = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
"""A server whose machine went away is noticed in seconds, not in hours (https://www.postgresql.org/docs/current/libpq-connect.html)."""


def server_engine(target: URL, url: str, *, patience: float) -> Engine:
    """Return an engine for the server at *target*; *url* names it in messages."""
    arguments = {"connect_timeout": max(2, round(patience)), "application_name": "holdfast", **_ANSWER_WITHIN}
    asked = {name: value for name, value in arguments.items() if name not in target.query}
    try:
        engine = create_engine(target, connect_args=asked, pool_pre_ping=True, max_overflow=-1, json_serializer=to_json)
    except ImportError as error:
        raise HistoryUnreachable(url, "its driver is missing, `pip install 'holdfast[control]'` brings it") from error
    except ArgumentError as error:
        raise HistoryUnreachable(url, str(error)) from error
    if why := _complaint(engine, target):
        raise HistoryUnreachable(url, why)
    milliseconds = max(1, int(patience * 1000))

    def wait_for_locks(raw: Any, _entry: ConnectionPoolEntry) -> None:  # noqa: ANN401 (psycopg's connection; the driver is optional)
        with raw.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {milliseconds}")
        raw.commit()

    event.listen(engine, "connect", wait_for_locks)
    return engine


def _complaint(engine: Engine, target: URL) -> str:
    """Say what no driver could make of the address' options; empty when there is nothing of the kind."""
    from psycopg import ProgrammingError, conninfo  # noqa: PLC0415 (the driver is optional)

    try:
        words = dict(engine.dialect.create_connect_args(target)[1])
        words.pop("context", None)  # of SQLAlchemy's own
        conninfo.make_conninfo(**words)
        conninfo.timeout_from_conninfo(words)
    except (ProgrammingError, ValueError) as error:
        return str(error).strip()
    return ""
