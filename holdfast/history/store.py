"""The history's database: SQLite by default, PostgreSQL by URL. Foreign errors are named at this edge."""

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
from holdfast.history.damage import MISREAD, damage_of
from holdfast.history.errors import translated
from holdfast.history.postgresql import server_engine
from holdfast.history.sanitize import clean_cell
from holdfast.history.sqlite_file import IMMEDIATE, empty_engine, file_engine, use_wal
from holdfast.redaction import shown

PATIENCE: Final = 5.0
"""Seconds to wait for another program's lock, and for a server to answer."""

LOOK_AGAIN: Final = 60.0
"""Seconds until a damaged row is looked for anew."""

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
        """For messages: passwords are hidden."""
        self._looking = threading.Lock()
        found = self._look()
        self._stands_in = found is None
        self._looked: tuple[float, RowCorrupt | None] = (-LOOK_AGAIN, None)
        """When a damaged row was looked for last (monotonic), and what was found."""
        self._engine = found or empty_engine()

    @classmethod
    def open(cls, url: str | None = None, *, create: bool = True, patience: float = PATIENCE) -> History:
        """Open the history at *url* (default: `paths.history_url`) with its tables up to date.

        With *create* off, a database that is not there reads as an empty history, until it is there.
        Wait up to *patience* seconds for locks and servers; raise `HistoryError` or `NotWritable`.
        """
        return cls(url or paths.history_url(), create=create, patience=patience)

    @contextmanager
    def session(self, *, immediate: bool = False) -> Iterator[Session]:
        """Give a session: committed at the end, rolled back on an error. Its rows stay readable afterwards.

        Who reads first and then writes by what was read asks for *immediate*: SQLite then takes its write lock at once.
        """
        engine = self.engine.execution_options(**{IMMEDIATE: True}) if immediate else self.engine
        try:
            with translated(self.url), _CleanSession(engine, expire_on_commit=False) as session:
                yield session
                session.commit()
        except MISREAD as error:
            if (damaged := self._damage_lately()) is None:
                raise
            raise damaged from error

    def _damage_lately(self) -> RowCorrupt | None:
        """Return such a row, looked for once in a while: a flow that meets it reads the history twice a second."""
        at, found = self._looked
        if time.monotonic() - at > LOOK_AGAIN:
            found = self.damage()
            self._looked = time.monotonic(), found
        return found

    def damage(self) -> RowCorrupt | None:
        """Return the first row that cannot be what was written; nothing where all can be. It looks through everything."""
        return damage_of(self.engine, self.url)

    @property
    def engine(self) -> Engine:
        """Return SQLAlchemy's engine; look again for a database that was not there."""
        if self._stands_in:
            with self._looking:
                self._look_again()
        return self._engine

    @property
    def dialect(self) -> str:
        """Return ``sqlite`` or ``postgresql``."""
        return self._engine.dialect.name

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _look_again(self) -> None:
        """Leave the stand-in for the database, if that is there by now."""
        found = self._look() if self._stands_in else None  # another thread may have been first
        if found is not None:
            stand_in, self._engine, self._stands_in = self._engine, found, False
            stand_in.dispose()

    def _look(self) -> Engine | None:
        """Return an engine whose tables are up to date; nothing for a reader where there are none."""
        if self._target.drivername == "sqlite":
            engine = file_engine(Path(self._target.database or ""), self.url, create=self._create, patience=self._patience)
        else:
            engine = server_engine(self._target, self.url, patience=self._patience)
        if engine is None:
            return None
        try:
            with translated(self.url):
                usable = self._is_up_to_date(engine)
        except BaseException:
            engine.dispose()
            raise
        if not usable:
            engine.dispose()
        return engine if usable else None

    def _is_up_to_date(self, engine: Engine) -> bool:
        """Migrate the tables if they are old or missing; leave missing ones missing for a reader."""
        with engine.connect() as connection:
            revision = schema.revision_of(connection)
            if revision is None:
                schema.refuse_another_programs(connection, self.url)
        if revision is None and not self._create:
            return False
        if self._create:
            use_wal(engine, self.url, patience=self._patience)
        if revision != schema.HEAD:
            schema.bring_to_head(engine.execution_options(**{IMMEDIATE: True}), self.url)
        return True


class _CleanSession(Session):
    """A session that lets no text through that a database cannot hold."""


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
    """Return *url* with the driver we use; raise `HistoryUnreachable` for what is no address of a history."""
    try:
        target = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise HistoryUnreachable(
            shown(url), "it is no database URL such as sqlite:////folder/history.db or postgresql://user@host/name"
        ) from error
    driver = _DRIVERS.get(target.drivername)
    if driver is None:
        raise HistoryUnreachable(shown(url), "only sqlite:/// and postgresql:// are spoken")
    if driver == "sqlite" and "?" in url:  # a file may be called so, and there are no options
        target = target.set(database=url.partition("///")[2], query={})
    if driver == "sqlite" and (target.database or ":memory:") == ":memory:":
        raise HistoryUnreachable(shown(url), "it names no file, as in sqlite:////folder/history.db")
    if target.username is not None and "@" in f"{target.host}{target.database}":  # or its rest is taken for a host, and shown
        raise HistoryUnreachable(shown(url), "an '@' in a password is written %40 there, a '%' %25, a '/' %2F")
    return target.set(drivername=driver)
