"""SQLAlchemy engines for the history: one SQLite file, checked before it is opened and in WAL mode, or a PostgreSQL server."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool
from sqlmodel import SQLModel

from holdfast import paths
from holdfast.errors import HistoryCorrupt, HistoryLocked, HistoryUnreachable, NotWritable
from holdfast.history import models
from holdfast.history.errors import translated
from holdfast.history.sanitize import to_json

IMMEDIATE: Final = "holdfast_immediate"
"""Execution option: take the write lock at the start of the transaction instead of failing at the first write."""

_RETRY_INTERVAL: Final = 0.01
_SECOND_CHECK: Final = 0.05
_MAGIC: Final = b"SQLite format 3\0"
_HEADER: Final = 100
"""Bytes of the file's header (https://www.sqlite.org/fileformat.html)."""

_OPENING: Final = threading.Lock()
"""Held while a file is opened, by SQLite or by us. Closing *any* descriptor of a file releases all locks of this process on it (fcntl(2)),
also those of its SQLite connections: the next process that closes the history then believes to be the last one and removes the journal,
and later writes of this process are lost."""

_TCP_TIMEOUTS: Final = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
"""Detect a dead server within seconds, not hours; the last value is in milliseconds
(https://www.postgresql.org/docs/current/libpq-connect.html)."""


# -- SQLite ---------------------------------------------------------------------------------------------------------------


def sqlite_engine(path: Path, url: str, *, create: bool, patience: float) -> Engine | None:
    """Return an engine for the file, created if *create*; None if it does not exist. *url* names it in messages."""
    if _exists(path, url):
        if _flaw(path):
            time.sleep(_SECOND_CHECK)  # another process may be writing it
            if flaw := _flaw(path):
                raise HistoryCorrupt(url, flaw)
    elif not create:
        return None
    else:
        _make_file(path, url)
    readonly = not create and not os.access(path, os.W_OK)
    # without its companion files SQLite can read a WAL database in a read-only folder only as immutable
    frozen = readonly and not path.with_name(path.name + "-wal").exists()
    mode = "rwc" if create else "ro" if readonly else "rw"
    address = f"file:{quote(str(path.absolute()))}?mode={mode}{'&immutable=1' if frozen else ''}"

    def connect() -> sqlite3.Connection:
        with _OPENING:
            raw = sqlite3.connect(address, uri=True, timeout=patience, isolation_level=None, check_same_thread=False)
        try:
            raw.execute("PRAGMA foreign_keys = ON")
            raw.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error:
            raw.close()
            raise
        return raw

    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=QueuePool, max_overflow=-1, json_serializer=to_json)
    event.listen(engine, "begin", _begin)
    return engine


def empty_engine() -> Engine:
    """Return an engine with empty tables in memory, for readers of a history that does not exist."""
    engine = create_engine("sqlite+pysqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    SQLModel.metadata.create_all(engine, tables=models.TABLES)
    return engine


def use_wal(engine: Engine, url: str, *, patience: float) -> None:
    """Switch a SQLite file to WAL, so that readers and a writer do not block each other; wait for locks, as SQLite does not here."""
    until = time.monotonic() + patience
    while engine.dialect.name == "sqlite":
        try:
            with translated(url), closing(engine.raw_connection()) as raw:
                raw.cursor().execute("PRAGMA journal_mode = WAL")
                return  # a file system without shared memory keeps its mode: slower, but correct
        except HistoryLocked:
            if time.monotonic() > until:
                raise
        time.sleep(_RETRY_INTERVAL)


def _exists(path: Path, url: str) -> bool:
    """Return whether the file exists; raise if something is there that is no readable file."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise HistoryUnreachable(url, error.strerror or str(error)) from error
    if not stat.S_ISREG(mode):
        raise HistoryCorrupt(url, "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")
    if not os.access(path, os.R_OK):
        raise HistoryUnreachable(url, "you may not read it")
    return True


def _flaw(path: Path) -> str:
    """Return what the header shows to be wrong: no SQLite database, or truncated. Empty if a journal may repair it."""
    for suffix in ("-wal", "-journal"):
        with suppress(FileNotFoundError):  # SQLite creates and removes its journals at any time
            if path.with_name(path.name + suffix).stat().st_size:
                return ""
    with _OPENING:
        if _is_open_here(path):
            return ""  # checked when it was opened
        with path.open("rb") as file:
            header, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
    if size == 0:
        return ""  # SQLite begins a database as an empty file
    if not header.startswith(_MAGIC) or len(header) < _HEADER:
        return "it is not an SQLite database"
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else max(page, 512)
    # the page count is valid if the program that wrote it was the last one to change the file
    pages = int.from_bytes(header[28:32], "big") if header[24:28] == header[92:96] else 0
    full = max(pages, -(-size // page)) * page
    return f"it is truncated (it has {size} bytes of {full})" if size < full else ""


def _is_open_here(path: Path) -> bool:
    """Return whether this process has the file open, as by an SQLite connection."""
    wanted = path.stat()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself, or one that another thread has just closed
            if os.path.samestat(descriptor.stat(), wanted):
                return True
    return False


def _make_file(path: Path, url: str) -> None:
    """Create the file and its folder, for this user only."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _OPENING, suppress(FileExistsError):  # the companion files of SQLite get the same mode
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise NotWritable("the history", url, error.strerror or str(error)) from error
    if path.is_relative_to(paths.home()):  # where anybody may create folders, another user may have created it a moment before
        paths.own_folder("HOLDFAST_HOME", str(path.parent))


def _begin(connection: Connection) -> None:
    """Begin the transaction ourselves: the driver would begin it only at the first write."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(IMMEDIATE) else "BEGIN")


# -- PostgreSQL -----------------------------------------------------------------------------------------------------------


def postgresql_engine(target: URL, url: str, *, patience: float) -> Engine:
    """Return an engine for the server at *target*; *url* names it in messages."""
    options = {"connect_timeout": max(2, round(patience)), "application_name": "holdfast", **_TCP_TIMEOUTS}
    missing = {name: value for name, value in options.items() if name not in target.query}
    try:
        engine = create_engine(target, connect_args=missing, pool_pre_ping=True, max_overflow=-1, json_serializer=to_json)
    except ImportError as error:
        raise HistoryUnreachable(url, "its driver is missing, `pip install 'holdfast[server]'` installs it") from error
    except ArgumentError as error:
        raise HistoryUnreachable(url, str(error)) from error
    if problem := _bad_option(engine, target):
        raise HistoryUnreachable(url, problem)
    milliseconds = max(1, int(patience * 1000))

    def limit_lock_waits(raw: Any, _entry: ConnectionPoolEntry) -> None:  # noqa: ANN401 (psycopg's connection; the driver is optional)
        with raw.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {milliseconds}")
        raw.commit()

    event.listen(engine, "connect", limit_lock_waits)
    return engine


def _bad_option(engine: Engine, target: URL) -> str:
    """Return which option of the address the driver rejects; empty if none."""
    from psycopg import ProgrammingError, conninfo  # noqa: PLC0415 (the driver is optional)

    try:
        options = dict(engine.dialect.create_connect_args(target)[1])
        options.pop("context", None)  # SQLAlchemy's own
        conninfo.make_conninfo(**options)
        conninfo.timeout_from_conninfo(options)
    except (ProgrammingError, ValueError) as error:
        return str(error).strip()
    return ""
