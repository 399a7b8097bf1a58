"""The recorder: whatever the database does, the caller goes on, and every row arrives in its order."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import HistoryUnreachable
from holdfast.history import History, Incident, JobTransition, Lease, Recorder, StepRecord, absorb, acquire, queries
from holdfast.history.changes import RowChange, added, append_to_outbox
from holdfast.history.lease import Fence, release_lease
from tests.history.children import ROOT, Child
from tests.history.postgres_server import PostgresServer
from tests.history.rows import a_fault, a_job, a_move, a_step, an_incident, one_of_each
from tests.waiting import wait_until

StartChild = Callable[..., Child]


@pytest.fixture
def outbox_path(tmp_path: Path) -> Path:
    """Give the place of a spill file whose folder is not there yet."""
    return tmp_path / "jobs" / "gpt" / "spill.jsonl"


@contextmanager
def recording(history: History, outbox_path: Path) -> Iterator[Recorder]:
    """Give a recorder that is closed at the end, even if the test fails."""
    recorder = Recorder(history, outbox_path)
    yield recorder
    recorder.close(0)
    wait_until(lambda: not recorder._writer.is_alive(), seconds=60)


@contextmanager
def away(history: History, history_url: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the database away: the file locked by another process, the server killed."""
    if history_url.startswith("postgresql"):
        server: PostgresServer = request.getfixturevalue("postgres")
        server.stop()
        yield
        server.start()
        return
    locker = Child("lock_file", history_url.removeprefix("sqlite:///"), "BEGIN EXCLUSIVE")
    assert locker.receive() == "locked"
    yield
    locker.send()
    assert locker.receive() == "unlocked"
    locker.end()


@pytest.fixture
def impatient(history_url: str) -> Iterator[History]:
    """Give a history that reports a lock soon."""
    history = History.open(history_url, patience=0.1)
    yield history
    history.close()


def test_rows_of_every_table_arrive_as_they_were_when_added(history: History, outbox_path: Path) -> None:
    """What the caller does to a row afterwards is not recorded by itself."""
    rows = one_of_each("j1")
    wanted = [copy.deepcopy(row.model_dump()) for row in rows]
    with recording(history, outbox_path) as recorder:
        for row in rows:
            recorder.add(row)
        rows[0].spec["name"] = rows[1].after = "changed"
        assert recorder.flush(60)
    with history.session() as session:
        found = [session.get(type(row), tuple(getattr(row, column.name) for column in row.__table__.primary_key)) for row in rows]
    assert [row and row.model_dump() for row in found] == wanted
    assert not outbox_path.exists()


def test_amendments_are_made_in_order_and_to_what_was_just_added(history: History, outbox_path: Path) -> None:
    """An incident is opened, amended and closed in one breath."""
    incident = an_incident("j1", 1)
    with recording(history, outbox_path) as recorder:
        recorder.add(incident)
        recorder.amend(Incident, incident.id, action="restart-workers")
        recorder.amend(Incident, incident.id, action="replace-node", closed_at=9.0)
        recorder.add(a_step("j1", 1))
        recorder.amend(StepRecord, ("j1", 1, 1), loss=float("nan"))
        recorder.amend(Incident, "nobody", action="x")
        assert recorder.flush(60)
    found = queries.incident(history, incident.id)
    assert (found.action, found.closed_at, found.kind) == ("replace-node", 9.0, incident.kind)
    last = queries.last_step(history, "j1")
    assert str(last and last.loss) == "nan"


def test_an_outage_loses_nothing_and_keeps_the_order(
    impatient: History, history_url: str, outbox_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """The database is locked, or its server killed, for a while: rows wait in memory, and it is said once."""
    caplog.set_level(logging.INFO, "holdfast")
    states = [f"S{number}" for number in range(50)]
    with recording(impatient, outbox_path) as recorder:
        recorder.add(a_move("j1", "S0"))
        assert recorder.flush(60)
        with away(impatient, history_url, request):
            for state in states[1:]:
                recorder.add(a_move("j1", state))
            incident = an_incident("j1", 1)
            recorder.add(incident)
            recorder.amend(Incident, incident.id, action="shrink-restart")
            wait_until(lambda: "history.unreachable" in caplog.text, seconds=60)
            assert not recorder.flush(1.5)
        assert recorder.flush(60)
    assert [move.after for move in queries.transitions(impatient, "j1")] == states
    assert queries.incidents(impatient, "j1")[0].action == "shrink-restart"
    events = [getattr(record, "event", "") for record in caplog.records]
    assert (events.count("history.unreachable"), events.count("history.reachable")) == (1, 1)
    assert not outbox_path.exists()


def test_what_cannot_be_written_in_time_is_spilled_and_absorbed_later(
    impatient: History, history_url: str, outbox_path: Path, request: pytest.FixtureRequest
) -> None:
    """The flow ends while the database is away: its successor brings the rows in, any number of times."""
    incident = an_incident("j1", 1)
    with away(impatient, history_url, request):
        recorder = Recorder(impatient, outbox_path)
        recorder.add(a_job(id="j1"))
        recorder.add(a_step("j1", 1, loss=float("nan")))
        recorder.add(incident)
        recorder.amend(Incident, incident.id, outcome="recovered")
        assert not recorder.close(0.2)
        recorder.add(a_step("j1", 2))  # late: spilled at once
        recorder.close(0)
    wait_until(lambda: not recorder._writer.is_alive(), seconds=60)
    kept = outbox_path.read_bytes()
    assert absorb(impatient, outbox_path) == 5
    assert not outbox_path.exists()
    for _ in range(2):
        outbox_path.write_bytes(kept)
        assert absorb(impatient, outbox_path) == 5
    assert absorb(impatient, outbox_path) == 0
    assert [job.id for job in queries.jobs(impatient)] == ["j1"]
    assert [(step.step, str(step.loss)) for step in queries.steps(impatient, "j1")] == [(1, "nan"), (2, "0.5")]
    assert queries.incident(impatient, 1).outcome == "recovered"
    assert not outbox_path.with_name("spill.jsonl.refused").exists()


class Keeper:
    """Keeps what waits, as agents do."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self.settled = 0

    def keep(self, first: int, until: int, records: Callable[[int], list[dict[str, Any]]]) -> None:
        """Keep all that waits."""
        self.kept = records(first)

    def forget(self, first: int) -> None:
        """Forget it."""
        self.kept, self.settled = [], first


def test_what_waits_for_the_database_is_safe_before_the_flow_ends(
    impatient: History, history_url: str, outbox_path: Path, request: pytest.FixtureRequest
) -> None:
    """It is on the disk and with others while the database is away, as a flow may be killed; once it is written both forget it."""
    keeper = Keeper()
    with recording(impatient, outbox_path) as recorder:
        recorder.remote_outbox = keeper
        with away(impatient, history_url, request):
            recorder.add(a_step("j1", 1))
            recorder.add(a_step("j1", 2))
            wait_until(lambda: outbox_path.exists() and len(outbox_path.read_text().splitlines()) == 2, seconds=60)
            recorder.add(a_step("j1", 3))
            wait_until(lambda: len(outbox_path.read_text().splitlines()) == 3, seconds=60)
            wait_until(lambda: [one["values"]["step"] for one in keeper.kept] == [1, 2, 3], seconds=60)
        wait_until(lambda: not outbox_path.exists() and not keeper.kept, seconds=60)
        assert keeper.settled == 3, "rows below it are refused when somebody offers them again"
    assert [one.step for one in queries.steps(impatient, "j1")] == [1, 2, 3]


def test_a_full_disk_is_logged_and_loses_nothing(
    impatient: History, history_url: str, outbox_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows wait in memory, and are written when the database is back."""
    outbox_path.parent.mkdir(parents=True)
    outbox_path.symlink_to("/dev/full")
    with recording(impatient, outbox_path) as recorder:
        with away(impatient, history_url, request):
            recorder.add(a_step("j1", 1))
            wait_until(lambda: "history.outbox-failing" in caplog.text, seconds=60)
            assert "No space left on device" in caplog.text
        wait_until(lambda: queries.steps(impatient, "j1"), seconds=60)


def test_a_deposed_controller_writes_no_more(history: History, outbox_path: Path) -> None:
    """Neither what it still had to write, nor what it left on its disk: that is set aside, but for what was seen."""
    first = acquire(history, a_job(id="j1"), holder="first")
    with recording(history, outbox_path) as recorder:
        recorder.fence = Fence("j1", first.epoch)
        recorder.add(a_move("j1", "RUNNING"))
        assert recorder.flush(60)
        release_lease(history, first)
        acquire(history, a_job(id="j1"), holder="second")
        recorder.add(a_move("j1", "DIAGNOSING"))
        assert recorder.flush(60)
        append_to_outbox(outbox_path, [added(a_move("j1", "ISOLATING")), added(a_step("j1", 7))], Fence("j1", first.epoch))
        absorb(history, outbox_path)
    assert [one.after for one in queries.transitions(history, "j1")] == ["RUNNING"]
    assert [one.step for one in queries.steps(history, "j1")] == [7]
    aside = [json.loads(line) for line in outbox_path.with_name("spill.jsonl.refused").read_text().splitlines()]
    assert [one["values"]["after"] for one in aside] == ["DIAGNOSING", "ISOLATING"]
    assert all("a newer controller" in one["reason"] for one in aside)


def test_absorbing_without_a_database_keeps_the_file(postgres: PostgresServer, outbox_path: Path) -> None:
    """It is absorbed the next time."""
    history = History.open(postgres.fresh_url())
    recorder = Recorder(history, outbox_path)
    recorder.close(0)
    recorder.add(a_job())
    postgres.stop()
    try:
        with pytest.raises(HistoryUnreachable):
            absorb(history, outbox_path)
    finally:
        postgres.start()
    assert absorb(history, outbox_path) == 1
    history.close()


def test_a_rejected_row_does_not_block_the_others(history: History, outbox_path: Path) -> None:
    """It is set aside with the reason: nothing is lost, and nothing waits for ever."""
    with recording(history, outbox_path) as recorder:
        recorder.add(a_job(id="j1"))
        for number in range(1, 20):
            recorder.add(a_step("j1", number))
            if number % 7 == 0:
                recorder.add(a_fault("j1", kind=None))
                recorder.add(a_fault("j1", step=10**30))
        assert recorder.flush(60)
    assert len(queries.steps(history, "j1")) == 19
    assert queries.faults(history, "j1") == []
    lines = [json.loads(line) for line in outbox_path.with_name("spill.jsonl.refused").read_text().splitlines()]
    assert [line["table"] for line in lines] == ["fault"] * 4
    assert all(line["reason"] for line in lines)


def test_an_invalid_row_is_logged_and_never_raised(history: History, outbox_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in the recording must not end a recovery."""
    with recording(history, outbox_path) as recorder:
        recorder.add("no row")  # type: ignore[arg-type]
        recorder.amend(JobTransition, "id", no_such_field=1)
        recorder.amend(Lease, ("too", "many"), epoch=1)
        recorder.add(a_job())
        assert recorder.flush(60)
    assert caplog.text.count("history.unrecordable") == 3
    assert len(queries.jobs(history)) == 1


def test_an_outbox_torn_by_a_crash_is_absorbed_as_far_as_readable(history: History, outbox_path: Path) -> None:
    """The torn line, and lines that are no changes, are kept beside it; a later spill begins on a line of its own."""
    recorder = Recorder(history, outbox_path)
    recorder.close(0)
    recorder.add(a_job(id="j1"))
    strange = [b"\xff\xfe", b"[]", b'{"table": "recipes", "values": {}, "key": null}', b'{"table": "job", "values": {"x": 1}, "key": null}']
    with outbox_path.open("ab") as file:
        file.write(b"\n".join(strange) + b'\n{"table": "job", "val')
    recorder.add(a_job(id="j2"))
    assert absorb(history, outbox_path) == 2
    assert {job.id for job in queries.jobs(history)} == {"j1", "j2"}
    assert len(outbox_path.with_name("spill.jsonl.refused").read_text().splitlines()) == 5
    assert not outbox_path.exists()


def test_an_outbox_that_cannot_be_written_goes_to_the_log(history: History, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last place left; closing does not raise."""
    (tmp_path / "file").touch()
    recorder = Recorder(history, tmp_path / "file" / "outbox_path")
    recorder.close(0)
    recorder.add(a_job(id="the-lost-one"))
    assert "history.lost" in caplog.text
    assert "the-lost-one" in caplog.text


def test_a_program_that_forgets_to_close_still_writes_what_it_recorded(history_url: str, tmp_path: Path) -> None:
    """The interpreter's end flushes."""
    script = f"""
from pathlib import Path
from holdfast.history import History, Recorder
from tests.history.rows import a_step
recorder = Recorder(History.open({history_url!r}), Path({str(tmp_path)!r}) / "outbox_path")
for number in range(1, 2001):
    recorder.add(a_step("j1", number))
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    history = History.open(history_url)
    assert len(queries.steps(history, "j1")) == 2000
    history.close()


cells = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5)
records = st.builds(
    lambda table, values, key: RowChange(table=table, values=values, key=key),
    st.just("job_transition"),
    st.dictionaries(st.sampled_from(["job_id", "at", "after", "generation"]), cells),
    st.none() | st.fixed_dictionaries({"id": st.text(max_size=5)}),
)


@given(records)
@settings(max_examples=50)
def test_a_change_is_the_same_after_the_outbox(change: RowChange) -> None:
    """Through JSON and back."""
    assert RowChange.from_record(json.loads(json.dumps(change.as_record()))) == change
