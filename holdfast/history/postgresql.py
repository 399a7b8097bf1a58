"""The history in a PostgreSQL database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.pool import ConnectionPoolEntry

from holdfast.errors import HistoryUnreachable
from holdfast.history.clean import to_json

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
    milliseconds = max(1, int(patience * 1000))

    def wait_for_locks(raw: Any, _entry: ConnectionPoolEntry) -> None:  # noqa: ANN401 (psycopg's connection; the driver is optional)
        with raw.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {milliseconds}")
        raw.commit()

    event.listen(engine, "connect", wait_for_locks)
    return engine
