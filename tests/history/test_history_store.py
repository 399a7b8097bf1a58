"""The database under the history: many processes, kills, and what is not there."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import HistoryUnreachable
from holdfast.history import History, Job, StepRecord, new_id, queries
from tests.history.children import Child
from tests.history.rows import a_fault, a_job, a_step, one_of_each
from tests.waiting import wait_until

StartChild = Callable[..., Child]


def test_every_row_comes_back_as_it_was_written(history: History) -> None:
    """Times, JSON and sizes beyond 32 bits are the same on both databases."""
    rows = one_of_each("j1")
    with history.session() as session:
        session.add_all(rows)
    with history.session() as session:
        for row in rows:
            key = tuple(getattr(row, column.name) for column in row.__table__.primary_key)
            again = session.get(type(row), key)
            assert again is not None
            assert again.model_dump() == row.model_dump()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, None, 1e-300])
def test_a_loss_that_went_bad_is_not_an_unreported_one(history: History, loss: float | None) -> None:
    """SQLite knows no NaN and would keep NULL."""
    with history.session() as session:
        session.add(a_step("j1", 1, loss=loss))
    last = queries.last_step(history, "j1")
    assert last is not None
    assert repr(last.loss) == repr(loss)


def test_text_that_no_database_holds_is_written_readably(history: History) -> None:
    """A worker's last words may be binary."""
    evidence = {"tail": "a\0b\ud800", "losses": [math.nan, math.inf], "more": {"x": (1, b"raw")}}
    with history.session() as session:
        session.add(a_fault("j1", target="rank\0 0 \udcff", evidence=evidence))
    (fault,) = queries.faults(history, "j1")
    assert fault.target == "rank\\0 0 \\udcff"
    assert fault.evidence == {"tail": "a\\0b\\ud800", "losses": ["NaN", "Infinity"], "more": {"x": [1, "b'raw'"]}}


def test_a_process_that_opens_a_history_twice_keeps_its_locks(tmp_path: Path, child: StartChild) -> None:
    """Or another process, closing it, would take the journal away from under both, and what they write later would be lost."""
    url = f"sqlite:///{tmp_path / 'history.db'}"
    History.open(url).close()
    first, second = History.open(url), History.open(url)
    try:
        assert (tmp_path / "history.db-wal").stat().st_size == 0, "nothing was written since: both look at the file itself"
        assert child("read_and_close", url).receive() == "jobs 0"
        with first.session() as session:
            session.add(a_job(id="j1"))
        assert child("read_and_close", url).receive() == "jobs 1"
    finally:
        second.close()
        first.close()


def test_an_error_in_a_session_leaves_nothing_of_it(history: History) -> None:
    """Half a truth is worse than none."""
    with pytest.raises(ZeroDivisionError), history.session() as session:  # noqa: PT012 (the write before is the point)
        session.add(a_job(id="j1"))
        session.flush()
        raise ZeroDivisionError
    assert queries.jobs(history) == []


def test_writers_and_readers_in_many_processes_get_along(history_url: str, child: StartChild) -> None:
    """Three processes write at once while a fourth reads: all that was committed is there."""
    count = 40
    writers = [child("write_steps", history_url, f"job{number}", str(count)) for number in range(3)]
    assert [writer.receive() for writer in writers] == ["1"] * 3  # all are at it
    reader = child("count_steps", history_url, "job0")
    seen: list[int] = []
    while not seen or seen[-1] < count:
        assert writers[0].process.poll() in {None, 0}
        reader.send()
        seen.append(int(reader.receive()))
    assert seen == sorted(seen)
    for writer in writers:
        assert [writer.receive() for _ in range(count - 1)][-1] == str(count)
        assert writer.process.wait() == 0
    history = History.open(history_url, create=False)
    assert [len(queries.steps(history, f"job{number}")) for number in range(3)] == [count] * 3
    history.close()


@pytest.mark.timeout(300)  # three processes in turn, each of which a busy machine may take half a minute to start
def test_a_writer_killed_in_the_middle_loses_nothing_it_had_committed(history_url: str, child: StartChild) -> None:
    """Kill -9 between two commits leaves a database that can be read and has what the writer had reported."""
    for number in range(3):
        writer = child("write_steps", history_url, f"job{number}", "1000000")
        committed = 0
        while committed < 20:
            committed = int(writer.receive())
        writer.kill()
        history = History.open(history_url)
        found = [step.step for step in queries.steps(history, f"job{number}")]
        assert len(found) >= committed
        assert found == list(range(1, len(found) + 1))
        with history.session() as session:
            session.add(a_job())
        history.close()
    if history_url.startswith("sqlite"):
        with sqlite3.connect(history_url.removeprefix("sqlite:///")) as raw:
            assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        raw.close()


def test_processes_that_open_a_fresh_database_at_once_all_succeed(history_url: str, child: StartChild) -> None:
    """One makes the tables, the others wait for it."""
    several = [child("open_at_the_signal", history_url) for _ in range(4)]
    assert {one.receive() for one in several} == {"ready"}
    for one in several:
        one.send()
    assert [one.receive() for one in several] == ["opened 0"] * 4


def test_threads_that_open_a_fresh_database_at_once_all_succeed(history_url: str) -> None:
    """Alembic keeps its state in globals: two threads must not meet in it."""
    opened: list[History] = []
    threads = [threading.Thread(target=lambda: opened.append(History.open(history_url, patience=60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(queries.jobs(history)) for history in opened] == [0] * 4
    for history in opened:
        history.close()


def test_a_reader_sees_an_empty_history_where_there_is_none_and_the_real_one_later(history_url: str) -> None:
    """`holdfast status` on a fresh machine answers and leaves no file; a watcher that started early sees what comes."""
    reader = History.open(history_url, create=False)
    assert queries.jobs(reader) == []
    assert queries.last_step(reader, "nobody") is None
    if history_url.startswith("sqlite"):
        assert not Path(history_url.removeprefix("sqlite:///")).exists()
    writer = History.open(history_url)
    with writer.session() as session:
        session.add(a_job("late"))
    assert [job.name for job in queries.jobs(reader)] == ["late"]
    reader.close()
    writer.close()


def test_an_open_needs_no_alembic_once_the_tables_are_there(history_url: str, child: StartChild) -> None:
    """Every CLI command opens the history: it may load neither Alembic nor torch nor Prefect for that."""
    History.open(history_url).close()
    loaded = json.loads(child("say_modules", history_url).receive())["modules"]
    assert not {"alembic", "torch", "prefect", "mako"} & set(loaded)
    assert ("psycopg" in loaded) == history_url.startswith("postgresql")


def test_the_sqlite_history_is_for_its_user_and_does_not_block_readers(tmp_path: Path) -> None:
    """The folder that we make is private, and the file is in WAL mode."""
    path = tmp_path / "new" / "folder" / "history.db"
    history = History.open(f"sqlite:///{path}")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with history.engine.connect() as connection:
        pragmas = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous", "foreign_keys")}
    assert pragmas == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1}
    history.close()


@pytest.mark.parametrize("name", ["a b.db", "a?b#c.db", "ä%20.db", "a'b.db"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces, question marks and percent signs mean nothing to us."""
    from sqlalchemy import URL  # noqa: PLC0415 (here alone)

    monkeypatch.setenv("HOLDFAST_HISTORY", URL.create("sqlite", database=str(tmp_path / name)).render_as_string())
    history = History.open()
    with history.session() as session:
        session.add(a_job())
    history.close()
    assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize(
    "url",
    ["history.db", "", "mysql://host/db", "sqlite://", "sqlite:///:memory:", "postgresql://h:port/db", "://", "sqlite+aiosqlite:///x"],
)
def test_an_address_that_is_none_is_named_with_the_cure(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped HOLDFAST_HISTORY is the operator's to mend."""
    monkeypatch.setenv("HOLDFAST_HISTORY", url or " ")
    with pytest.raises(HistoryUnreachable, match=r"(?i)fix HOLDFAST_HISTORY"):
        History.open()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3c/ret+=@127.0.0.1:1/none",
        "postgresql://127.0.0.1:1/none?user=me&password=s3c/ret%2B=&application_name=x",
        "postgresql://me:s3c@ret@127.0.0.1:1/none",
        "postgresql://me:s3c@ret/x@127.0.0.1:1/none",
        "postgresql://me:s3c/ret@127.0.0.1:port/none",
        "postgresql:/me:s3c/ret@127.0.0.1:1/none",
        "postgresql://me@s3c/ret@127.0.0.1:port/none",
        "postgresql://me:s3c@/none?host=127.0.0.1&port=1&sslpassword=ret",
        "postgresql://me:s3c@127.0.0.1:1/none?application=x",
        "postgresql://me:s3c@127.0.0.1:1/none?connect_timeout=soon",
        "postgresql://me:s3c@127.0.0.1/none?port=soon",
        "mysql://me:s3c@127.0.0.1:1/none",
        "me:s3c?ret@127.0.0.1:1/none",
        "host=127.0.0.1 user=me password='s3c \\'ret' dbname=none",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    """Messages go to logs, whether the address can be read or not; the host stays in them."""
    with pytest.raises(HistoryUnreachable) as caught:
        History.open(url, patience=2)
    message = str(caught.value)
    assert ("s3c" in message, "ret" in message, "***" in message, "127.0.0.1" in message) == (False, False, True, True)


def test_ids_of_a_process_grow_even_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest move is the state: an adjusted clock must not bring an old state back."""
    first = new_id()
    monkeypatch.setattr("time.time_ns", lambda: 1_000_000_000)
    ids = [first, *(new_id() for _ in range(1000))]
    assert ids == sorted(set(ids))
    assert {len(one) for one in ids} == {24}


def test_readers_in_threads_share_a_history(history: History) -> None:
    """Prefect runs tasks in threads."""
    with history.session() as session:
        session.add_all(a_step("j1", number) for number in range(1, 51))
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(len(queries.curve(history, "j1")))) for _ in range(20)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(seen) == 20, seconds=60)
    assert seen == [50] * 20
    for thread in threads:
        thread.join()


def test_a_row_can_be_read_after_its_session(history: History) -> None:
    """Flows hand rows around."""
    with history.session() as session:
        job = Job(name="gpt", directory="/", at=1.0)
        session.add(job)
        session.add(StepRecord(job_id=job.id, generation=1, step=1, at=1.0, seconds=1.0))
    assert job.name == "gpt"
    assert job.spec == {}
