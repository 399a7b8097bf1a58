"""The history as one SQLite file: looked at before it is touched, in WAL mode so that readers and a writer do not wait for each other."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from sqlalchemy import Connection, Engine, StaticPool, create_engine, event
from sqlalchemy.pool import QueuePool
from sqlmodel import SQLModel

from holdfast import paths
from holdfast.errors import HistoryCorrupt, HistoryLocked, HistoryUnreachable, NotWritable
from holdfast.history import models
from holdfast.history.errors import translated
from holdfast.history.sanitize import to_json

IMMEDIATE: Final = "holdfast_immediate"
"""Execution option: take the write lock at the beginning of the transaction, instead of failing at the first write."""

_RETRY_EVERY: Final = 0.01
_SECOND_LOOK: Final = 0.05
_MAGIC: Final = b"SQLite format 3\0"
_HEADER: Final = 100
"""Bytes of the file's header (https://www.sqlite.org/fileformat.html)."""

_OPENING: Final = threading.Lock()
"""Held while a file is opened, by SQLite or beside it. Closing *any* descriptor of a file ends all locks that this process has on it
(fcntl(2)), those of its SQLite connections too: the next process that closes the history then takes itself for the last one and removes the
journal under them, and what they write from then on is nobody's."""

Connect = Callable[[], sqlite3.Connection]


def file_engine(path: Path, url: str, *, create: bool, patience: float) -> Engine | None:
    """Return an engine for the file, made if *create*; nothing where there is none. *url* names it in messages."""
    there = _is_there(path, url)
    if there:
        _refuse_a_torn_file(path, url)
    elif not create:
        return None
    else:
        _make_folder(path, url)
    connect = _connector(path, create=create, patience=patience)
    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=QueuePool, max_overflow=-1, json_serializer=to_json)
    event.listen(engine, "begin", _begin)
    return engine


def empty_engine() -> Engine:
    """Return an engine with empty tables in memory, for readers of a history that is not there."""
    engine = create_engine("sqlite+pysqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    SQLModel.metadata.create_all(engine, tables=models.TABLES)
    return engine


def _is_there(path: Path, url: str) -> bool:
    """Tell whether the file exists; raise for what is there and is no file that may be read."""
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


def _refuse_a_torn_file(path: Path, url: str) -> None:
    """Raise `HistoryCorrupt` for a file that is no SQLite database or whose end is missing; SQLite itself may notice only later."""
    if _flaw(path):
        time.sleep(_SECOND_LOOK)  # another process may have been writing it
        if flaw := _flaw(path):
            raise HistoryCorrupt(url, flaw)


def _flaw(path: Path) -> str:
    """Return what is wrong with the file as far as its header tells; nothing while a journal beside it may mend it."""
    if any(_size(path.with_name(path.name + ending)) for ending in ("-wal", "-journal")):
        return ""
    with _OPENING:
        if _is_open_here(path):
            return ""  # it was looked at before that
        with path.open("rb") as file:
            header, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
    if size == 0:
        return ""  # SQLite's own beginning of a database
    if not header.startswith(_MAGIC) or len(header) < _HEADER:
        return "it is not an SQLite database"
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else max(page, 512)
    # The count of pages holds if the program that wrote it was the last to change the file.
    pages = int.from_bytes(header[28:32], "big") if header[24:28] == header[92:96] else 0
    whole = max(pages, -(-size // page)) * page
    return f"its end is missing (it has {size} bytes of {whole})" if size < whole else ""


def _size(path: Path) -> int:
    """Return the file's size; nothing for one that is not there, or no longer: SQLite makes and removes its journals at any time."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _is_open_here(path: Path) -> bool:
    """Tell whether this process has the file open, as by an SQLite connection."""
    wanted = path.stat()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself, or one that another thread has just closed
            if os.path.samestat(descriptor.stat(), wanted):
                return True
    return False


def _make_folder(path: Path, url: str) -> None:
    """Make the folder of a new file, for this user alone."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _OPENING, suppress(FileExistsError):  # the files that SQLite puts beside it get the same mode
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise NotWritable("the history", url, error.strerror or str(error)) from error
    home = paths.home()
    if path.is_relative_to(home):  # somebody else may have made it a moment before us, where anybody may make folders
        paths.own_folder("HOLDFAST_HOME", str(path.parent))


def _connector(path: Path, *, create: bool, patience: float) -> Connect:
    """Return what opens a connection to the file. A file that may not be written is opened for reading."""
    readonly = not create and not os.access(path, os.W_OK)
    # Without its companion files SQLite can read a WAL database in a folder that may not be written only like this.
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

    return connect


def use_wal(engine: Engine, url: str, *, patience: float) -> None:
    """Switch the file to WAL, where readers and a writer do not wait for each other. SQLite does not wait for locks here: we do."""
    until = time.monotonic() + patience
    while engine.dialect.name == "sqlite":
        try:
            with translated(url), closing(engine.raw_connection()) as raw:
                raw.cursor().execute("PRAGMA journal_mode = WAL")
                return  # a file system without shared memory keeps its old mode: slower, and right
        except HistoryLocked:
            if time.monotonic() > until:
                raise
        time.sleep(_RETRY_EVERY)


def _begin(connection: Connection) -> None:
    """Begin the transaction ourselves: the driver would begin it only at the first write."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(IMMEDIATE) else "BEGIN")
