"""A history that cannot be used: one message with the cure, and the file as it was."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text as sql
from sqlmodel import select

from holdfast.errors import (
    HistoryAccessDenied,
    HistoryCorrupt,
    HistoryLocked,
    HistoryTooManyConnections,
    HistoryTooNew,
    HistoryUnreachable,
    NotWritable,
    OperatorError,
    RowCorrupt,
)
from holdfast.history import History, models, queries
from holdfast.history.errors import is_transient
from holdfast.history.schema import VERSION_TABLE
from tests.history.children import ROOT, Child
from tests.history.postgres_server import PostgresServer
from tests.history.rows import a_job, a_step

StartChild = Callable[..., Child]


def url_of(path: Path) -> str:
    """Return the URL of an SQLite file."""
    return f"sqlite:///{path}"


def filled(path: Path, steps: int = 2000) -> Path:
    """Return an SQLite history with a few hundred kilobytes in it, closed."""
    history = History.open(url_of(path))
    with history.session() as session:
        session.add(a_job())
        session.add_all(a_step("j1", number) for number in range(1, steps + 1))
    history.close()
    return path


def text(path: Path) -> None:
    """Put a text there."""
    path.write_text("Dear history,\n" * 500)


def short_text(path: Path) -> None:
    """Put a text there that is shorter than a header."""
    path.write_text("x")


def noise(path: Path) -> None:
    """Put random bytes there."""
    path.write_bytes(os.urandom(20_000))


def folder(path: Path) -> None:
    """Put a folder there."""
    path.mkdir()


def pipe(path: Path) -> None:
    """Put a pipe there, which would be read for ever."""
    os.mkfifo(path)


def beginning(path: Path) -> None:
    """Put the first pages of a history there."""
    filled(path)
    os.truncate(path, 8 * 4096)


def torn_page(path: Path) -> None:
    """Put a history there whose last page is half."""
    filled(path)
    os.truncate(path, path.stat().st_size - 2048)


def bad_schema(path: Path) -> None:
    """Put a history there whose first page was overwritten behind the header."""
    filled(path)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(3996))


def foreign(path: Path) -> None:
    """Put the database of another program there."""
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE recipes (name TEXT)")
    raw.close()


def snapshot(path: Path) -> dict[str, bytes | str]:
    """Return what lies in the folder."""
    return {one.name: one.read_bytes() if one.is_file() else "no file" for one in path.iterdir()}


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("put", [text, short_text, noise, folder, pipe, beginning, torn_page, bad_schema, foreign])
def test_what_is_no_whole_history_is_named_and_left_untouched(tmp_path: Path, put: Callable[[Path], None], create: bool) -> None:  # noqa: FBT001
    """Writers and readers alike."""
    path = tmp_path / "history.db"
    put(path)
    before = snapshot(tmp_path)
    with pytest.raises(HistoryCorrupt) as caught:
        History.open(url_of(path), create=create)
    assert caught.value.url == url_of(path)
    assert caught.value.reason
    after = snapshot(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not after.get("history.db-wal")  # SQLite may have made its companions; nothing is in them


def test_damage_in_the_middle_is_named_when_it_is_read(tmp_path: Path) -> None:
    """Opening does not read the whole file; the query that meets the damage says so."""
    path = filled(
        tmp_path / "history.db", steps=6000
    )  # so many that the tables' own description, which opening reads, lies before the middle
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 4096 // 2 * 4096)
        file.write(b"\xff" * (size // 3))
    history = History.open(url_of(path))
    with pytest.raises(HistoryCorrupt) as caught:
        queries.steps(history, "j1")
    assert (caught.value.url, caught.value.reason) == (url_of(path), "database disk image is malformed")
    history.close()


def test_a_row_that_is_not_what_was_written_is_named(history: History) -> None:
    """By table and key, on both databases; what they let pass for something else is found once it has made trouble."""
    with history.session() as session:
        session.add_all([a_job(id="j1"), a_job(id="j2"), a_step("j2", 3, loss=float("nan"))])
    assert history.find_corrupt_row() is None
    with history.engine.begin() as connection:
        connection.execute(sql("UPDATE job SET spec = '[1]' WHERE id = 'j2'"))
    with pytest.raises(RowCorrupt, match=r"its column 'spec' holds .*, which is no object") as caught, history.session() as session:
        _ = [job.spec["name"] for job in session.exec(select(models.Job)).all()]
    assert (caught.value.table, caught.value.row) == ("job", "j2")


def test_an_empty_file_becomes_a_history(tmp_path: Path) -> None:
    """SQLite begins that way, and so does `mktemp`."""
    path = tmp_path / "history.db"
    path.touch()
    reader = History.open(url_of(path), create=False)
    assert queries.jobs(reader) == []
    reader.close()
    assert path.stat().st_size == 0
    History.open(url_of(path)).close()
    assert path.stat().st_size > 0


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    """A file stands where the folder should."""
    (tmp_path / "file").touch()
    with pytest.raises(NotWritable) as caught:
        History.open(url_of(tmp_path / "file" / "deep" / "history.db"))
    assert (caught.value.path, caught.value.reason) == (url_of(tmp_path / "file" / "deep" / "history.db"), "Not a directory")
    reader = History.open(url_of(tmp_path / "file" / "history.db"), create=False)
    assert queries.jobs(reader) == []
    reader.close()


def without_privileges(name: str, *arguments: str) -> str:
    """Return what a child of children.py says that may not write where the permissions say so, even when the tests run as root."""
    argv = [sys.executable, "-m", "tests.history.children", name, *arguments]
    if os.geteuid() == 0:
        argv = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", *argv]
    done = subprocess.run(argv, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip()


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    """For one who wants to write; a reader finds an empty history."""
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    assert without_privileges("open_readonly", url_of(home / "history.db"), "create").startswith("NotWritable")
    assert without_privileges("open_readonly", url_of(home / "sub" / "history.db"), "create").startswith("NotWritable")
    assert without_privileges("open_readonly", url_of(home / "history.db"), "read") == "0"
    assert snapshot(home) == {}


def test_a_history_that_may_not_be_written_can_be_read(tmp_path: Path) -> None:
    """An archived one, or a colleague's: `holdfast ps -a` reads it, a flow reports that it cannot write."""
    home = tmp_path / "home"
    home.mkdir()
    path = filled(home / "history.db")
    path.chmod(0o444)
    home.chmod(0o555)
    before = snapshot(home)
    assert without_privileges("open_readonly", url_of(path), "read") == "1"
    assert snapshot(home) == before
    home.chmod(0o755)


def test_a_history_that_may_not_be_written_refuses_a_writer(tmp_path: Path) -> None:
    """At the first write, or at the opening: never in silence."""
    path = filled(tmp_path / "history.db")
    path.chmod(0o444)
    said = without_privileges("write_or_say", url_of(path))
    assert said.startswith("NotWritable"), said


@pytest.mark.parametrize("statement", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE"])
def test_a_fresh_file_locked_by_another_process_is_named(tmp_path: Path, child: StartChild, statement: str) -> None:
    """A program that locks the file and does not release it."""
    path = tmp_path / "history.db"
    locker = child("lock_file", str(path), statement)
    assert locker.receive() == "locked"
    before = snapshot(tmp_path)
    with pytest.raises(HistoryLocked) as caught:
        History.open(url_of(path), patience=0.2)
    assert caught.value.url == url_of(path)
    assert snapshot(tmp_path) == before
    locker.send()
    assert locker.receive() == "unlocked"
    History.open(url_of(path)).close()


def test_a_locked_history_is_read_and_its_writer_is_named(tmp_path: Path, child: StartChild) -> None:
    """In WAL mode a writer never stops a reader; a second writer waits its patience and says who is in the way."""
    path = filled(tmp_path / "history.db")
    locker = child("lock_file", str(path), "BEGIN EXCLUSIVE")
    assert locker.receive() == "locked"
    history = History.open(url_of(path), patience=0.2)
    assert len(queries.jobs(history)) == 1
    with pytest.raises(HistoryLocked), history.session() as session:
        session.add(a_job())
    locker.send()
    assert locker.receive() == "unlocked"
    with history.session() as session:
        session.add(a_job())
    assert len(queries.jobs(history)) == 2
    history.close()


def test_an_open_waits_for_a_lock_that_goes(tmp_path: Path, child: StartChild) -> None:
    """A lock for less than our patience is no trouble."""
    path = tmp_path / "history.db"
    locker = child("lock_file", str(path), "BEGIN EXCLUSIVE")
    assert locker.receive() == "locked"
    opener = child("open_at_the_signal", url_of(path))
    assert opener.receive() == "ready"
    opener.send()
    locker.send()
    assert locker.receive() == "unlocked"
    assert opener.receive() == "opened 0"


def test_a_history_of_a_newer_holdfast_is_refused(history_url: str) -> None:
    """An old program must not write into tables that it does not know."""
    history = History.open(history_url)
    with history.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")  # noqa: S608 (a constant)
    history.close()
    for create in (True, False):
        with pytest.raises(HistoryTooNew, match=r"9999.*Upgrade this one"):
            History.open(history_url, create=create)


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    """No socket, a refused port, an unknown database."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        port = taken.getsockname()[1]
        for url in (f"postgresql://me@/db?host={tmp_path}", f"postgresql://me@127.0.0.1:{port}/db"):
            with pytest.raises(HistoryUnreachable, match="HOLDFAST_HISTORY"):
                History.open(url, patience=2)


@pytest.mark.parametrize(
    ("user", "database", "expected"),
    [
        ("guarded:s3cr3t", "postgres", r'password authentication failed for user "guarded"\. Fix the password or the user'),
        ("guarded", "postgres", r"no password supplied\. Give the password"),
        ("nobody", "postgres", r'role "nobody" does not exist\. Fix the user .*CREATE ROLE'),
        ("nologin", "postgres", r'role "nologin" is not permitted to log in\. .*ALTER ROLE'),
        ("holdfast", "nowhere", r'database "nowhere" does not exist\. Fix the name of the database .*CREATE DATABASE'),
        ("barred", "postgres", r'pg_hba.conf rejects connection .*user "barred".*\. Allow this host'),
    ],
)
def test_refused_access_names_reason_and_cure(postgres: PostgresServer, user: str, database: str, expected: str) -> None:
    """The server runs: no message says to start it, and nothing waits for it."""
    with psycopg.connect(host=str(postgres.folder), user="holdfast", dbname="postgres") as admin:
        for role in ("guarded LOGIN PASSWORD 'another'", "nologin NOLOGIN", "barred LOGIN"):
            name = role.partition(" ")[0]
            admin.execute(f"DO $$ BEGIN CREATE ROLE {role}; EXCEPTION WHEN duplicate_object THEN ALTER ROLE {name}; END $$".encode())
    with pytest.raises(HistoryAccessDenied, match=expected) as caught:
        History.open(postgres.url(database).replace("holdfast@", f"{user}@"))
    assert "Start the database" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert not is_transient(caught.value)


def test_a_server_that_has_no_connection_left_is_named_with_its_own_cure(postgres: PostgresServer) -> None:
    """It runs: no message says to start it. Of a role's limit, and of the server's own, which is found by taking all that there are."""
    with ExitStack() as held:
        first = held.enter_context(psycopg.connect(host=str(postgres.folder), user="holdfast", dbname="postgres", autocommit=True))
        first.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
        urls = [postgres.url("postgres").replace("holdfast@", "crowded@"), postgres.url("postgres")]
        with suppress(psycopg.OperationalError):
            while True:
                held.enter_context(psycopg.connect(host=str(postgres.folder), user="holdfast", dbname="postgres"))
        for url in urls:
            with pytest.raises(HistoryTooManyConnections, match=r"max_connections") as caught:
                History.open(url)
            assert "Start the database" not in str(caught.value)
            assert is_transient(caught.value), "a flow waits for it"
        first.execute("DROP ROLE crowded")


def test_a_server_that_went_away_is_named_and_found_again(postgres: PostgresServer) -> None:
    """A reader that lives longer than the server needs no new start."""
    history = History.open(postgres.fresh_url())
    postgres.stop()
    try:
        with pytest.raises(HistoryUnreachable):
            queries.jobs(history)
    finally:
        postgres.start()
    assert queries.jobs(history) == []
    history.close()


def test_every_trouble_is_the_operators() -> None:
    """The CLI prints these without a traceback."""
    for kind in (HistoryCorrupt, HistoryLocked, HistoryTooNew, HistoryUnreachable, NotWritable):
        assert issubclass(kind, OperatorError)
