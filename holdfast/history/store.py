"""The history's database: SQLite by default, PostgreSQL by URL. Errors of the drivers are translated here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlmodel import Session

from holdfast import paths
from holdfast.errors import HistoryUnreachable, RowCorrupt
from holdfast.history import schema
from holdfast.history.engines import IMMEDIATE, empty_engine, postgresql_engine, sqlite_engine, use_wal
from holdfast.history.errors import MISREAD, find_corrupt_row, translated
from holdfast.history.sanitize import clean_cell
from holdfast.security.redaction import shown

PATIENCE: Final = 5.0
"""Seconds to wait for another program's lock, and for a server to answer."""

CORRUPT_ROW_INTERVAL: Final = 60.0
"""Seconds between two searches for a corrupt row."""

_DRIVERS: Final = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}


class History:
    """An open history. Threads may share it; each process opens its own."""

    def __init__(self, url: str, *, create: bool, patience: float) -> None:
        self._target = _parsed(url)
        self._create, self._patience = create, patience
        self.url = shown(self._target.render_as_string(hide_password=False))
        """For messages, without the password."""
        self._connecting = threading.Lock()
        found = self._connect()
        self._is_missing = found is None
        self._corrupt: tuple[float, RowCorrupt | None] = (-CORRUPT_ROW_INTERVAL, None)
        """When a corrupt row was last searched for (monotonic), and the result."""
        self._engine = found or empty_engine()

    @classmethod
    def open(cls, url: str | None = None, *, create: bool = True, patience: float = PATIENCE) -> History:
        """Open the history at *url* (default: `paths.history_url`) with up-to-date tables.

        With *create* off, a missing database reads as an empty history until it exists.
        Wait up to *patience* seconds for locks and servers; raise `HistoryError` or `NotWritable`.
        """
        return cls(url or paths.history_url(), create=create, patience=patience)

    @contextmanager
    def session(self, *, immediate: bool = False) -> Iterator[Session]:
        """Give a session: committed at the end, rolled back on an error. Its rows stay readable afterwards.

        Use *immediate* to read and then write what depends on it: SQLite then takes its write lock at once.
        """
        engine = self.engine.execution_options(**{IMMEDIATE: True}) if immediate else self.engine
        try:
            with translated(self.url), _CleanSession(engine, expire_on_commit=False) as session:
                yield session
                session.commit()
        except MISREAD as error:
            at, found = self._corrupt
            if time.monotonic() - at > CORRUPT_ROW_INTERVAL:  # a controller reads the history twice a second
                found = self.find_corrupt_row()
                self._corrupt = time.monotonic(), found
            if found is None:
                raise
            raise found from error

    def find_corrupt_row(self) -> RowCorrupt | None:
        """Return the first corrupt row, None if there is none; this reads the whole database."""
        return find_corrupt_row(self.engine, self.url)

    @property
    def engine(self) -> Engine:
        """Return SQLAlchemy's engine; try again to open a database that did not exist."""
        if self._is_missing:
            with self._connecting:
                self._connect_again()
        return self._engine

    @property
    def dialect(self) -> str:
        """Return ``sqlite`` or ``postgresql``."""
        return self._engine.dialect.name

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _connect_again(self) -> None:
        """Replace the empty engine if the database exists by now."""
        found = self._connect() if self._is_missing else None  # another thread may have been first
        if found is not None:
            empty, self._engine, self._is_missing = self._engine, found, False
            empty.dispose()

    def _connect(self) -> Engine | None:
        """Return an engine with up-to-date tables; None for a reader if there are none."""
        if self._target.drivername == "sqlite":
            engine = sqlite_engine(Path(self._target.database or ""), self.url, create=self._create, patience=self._patience)
        else:
            engine = postgresql_engine(self._target, self.url, patience=self._patience)
        if engine is None:
            return None
        try:
            with translated(self.url):
                usable = self._migrate(engine)
        except BaseException:
            engine.dispose()
            raise
        if not usable:
            engine.dispose()
        return engine if usable else None

    def _migrate(self, engine: Engine) -> bool:
        """Migrate old or missing tables; return False for a reader if they are missing."""
        with engine.connect() as connection:
            revision = schema.revision_of(connection)
            if revision is None:
                schema.refuse_foreign_file(connection, self.url)
        if revision is None and not self._create:
            return False
        if self._create:
            use_wal(engine, self.url, patience=self._patience)
        if revision != schema.HEAD:
            schema.upgrade_to_head(engine.execution_options(**{IMMEDIATE: True}), self.url)
        return True


class _CleanSession(Session):
    """A session that cleans text that a database cannot store."""


@event.listens_for(_CleanSession, "before_flush")
def _clean_rows(session: Session, *_: Any) -> None:  # noqa: ANN401 (SQLAlchemy's signature)
    """Clean every cell that is about to be written."""
    for row in [*session.new, *session.dirty]:
        for name in row.__table__.columns.keys():  # noqa: SIM118 (a collection of columns, not a dict)
            value = getattr(row, name)
            cleaned = clean_cell(value)
            if isinstance(value, str) and cleaned != value:
                setattr(row, name, cleaned)


def _parsed(url: str) -> URL:
    """Return *url* with our driver; raise `HistoryUnreachable` if it is no address of a history."""
    try:
        target = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise HistoryUnreachable(
            shown(url), "it is no database URL such as sqlite:////folder/history.db or postgresql://user@host/name"
        ) from error
    driver = _DRIVERS.get(target.drivername)
    if driver is None:
        raise HistoryUnreachable(shown(url), "only sqlite:/// and postgresql:// are supported")
    if driver == "sqlite" and "?" in url:  # part of the file's name: there are no options
        target = target.set(database=url.partition("///")[2], query={})
    if driver == "sqlite" and (target.database or ":memory:") == ":memory:":
        raise HistoryUnreachable(shown(url), "it names no file, as in sqlite:////folder/history.db")
    if target.username is not None and "@" in f"{target.host}{target.database}":  # else part of the password is shown as the host
        raise HistoryUnreachable(shown(url), "in a password write '@' as %40, '%' as %25 and '/' as %2F")
    return target.set(drivername=driver)
