"""The ranks of a new job start while Prefect starts: a launcher controls the job until the flow can."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.control.supervisor.early_launch import LATE
from holdfast.history import History, holder_of, queries
from holdfast.host.process import parent_of, state_of
from tests.integration.conftest import PrefectServer
from tests.integration.test_prefect_shows import artifact, asked
from tests.integration.test_run_command import NAP, ROOT, SECONDS, Place, gone, running
from tests.mentions import mentions, one_line_mentions
from tests.waiting import wait_until


@pytest.fixture
def silent(tmp_path: Path, holdfast_home: Path, prefect_server: PrefectServer) -> Iterator[Place]:
    """Give a place whose Prefect server takes connections and never answers: no flow gets as far as its job."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        place = Place(tmp_path, holdfast_home, prefect_server)
        place.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        yield place


@pytest.fixture
def place(tmp_path: Path, holdfast_home: Path, prefect_server: PrefectServer) -> Place:
    """Give a place with a Prefect server."""
    return Place(tmp_path, holdfast_home, prefect_server)


def launcher_of(place: Place, job: str) -> int:
    """Return the pid of the launcher that controls *job*."""
    with closing(History.open(place.history, create=False)) as history:
        lease = holder_of(history, queries.newest_job(history, job).id)
    assert lease is not None
    return lease.pid


def texts(place: Place, job: str) -> list[str]:
    """Return what was recorded of *job*, in order."""
    with closing(History.open(place.history, create=False)) as history:
        return [one.text for one in queries.job_events(history, queries.newest_job(history, job).id)]


def test_ranks_run_before_prefect_does_and_the_death_of_the_flow_ends_them(silent: Place) -> None:
    """The launcher is a child of the flow's process, and nothing is left of both."""
    child = silent.start("run", silent.job("starts-first", NAP))
    worker = silent.worker()
    launcher = launcher_of(silent, "starts-first")
    flow = parent_of(launcher)
    assert flow is not None
    assert parent_of(flow) == child.pid
    wait_until(lambda: silent.state("starts-first") == "RUNNING", seconds=SECONDS, explain=silent.log)
    assert launcher_of(silent, "starts-first") == launcher
    for command in ("ps", "status"):
        status, shown = silent.done(command)
        assert (status, mentions(shown, "starts-first", "RUNNING")) == (0, True), shown
    os.kill(flow, signal.SIGKILL)
    said, _ = child.communicate(timeout=SECONDS)
    wait_until(lambda: silent.state("starts-first") == "CANCELLED", seconds=SECONDS, explain=silent.log)
    wait_until(lambda: state_of(worker) in "?Z", seconds=SECONDS)
    gone(silent)
    assert child.returncode != 0, said


def test_a_rank_that_is_killed_before_prefect_runs_is_replaced_at_once(silent: Place) -> None:
    """The launcher recovers as the flow would: there is none so far, and another worker runs."""
    child = silent.start("run", silent.job("killed-first", NAP))
    worker = silent.worker()
    os.kill(worker, signal.SIGKILL)
    with closing(History.open(silent.history, create=False)) as history:
        job = queries.newest_job(history, "killed-first")
        wait_until(
            lambda: [one.outcome for one in queries.incidents(history, job.id)] == ["recovered"], seconds=SECONDS, explain=silent.log
        )
        (incident,) = queries.incidents(history, job.id)
        lease = holder_of(history, job.id)
    assert (incident.kind, incident.outcome, incident.action) == ("worker-sigkill", "recovered", "restart-workers")
    assert lease is not None
    assert (lease.epoch, lease.flow_run) == (1, ""), "no flow has had it"
    assert state_of(worker) in "?Z"
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=SECONDS)
    assert (child.returncode, silent.state("killed-first")) == (130, "CANCELLED"), said
    gone(silent)


LATE_PREFECT = """
import os, runpy, sys
sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
if not os.path.exists({mended!r}):
    sys.exit("prefect does not start today")
sys.modules.pop("prefect", None)
if __name__ == "__main__":
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
else:
    import prefect
"""
"""Stands before the installed Prefect, which starts once a file is there."""


def late(place: Place) -> Path:
    """Have a temporary Prefect server not start until the file that is returned is there."""
    before, mended = place.folder / "before", place.folder / "mended"
    before.mkdir()
    (before / "prefect.py").write_text(LATE_PREFECT.format(mended=str(mended)))
    place.environment["PYTHONPATH"] = f"{before}:{ROOT}"
    del place.environment["PREFECT_API_URL"]
    return mended


def test_a_job_whose_prefect_server_does_not_start_trains_to_its_end(place: Place) -> None:
    """Its launcher controls it, and recovers from a fault; people learn of it."""
    late(place)
    child = place.start("run", place.job("unseen", NAP))
    worker = place.worker()
    wait_until(lambda: LATE in texts(place, "unseen"), seconds=SECONDS, explain=place.log)
    os.kill(worker, signal.SIGKILL)

    def recovered() -> bool:
        with closing(History.open(place.history, create=False)) as history:
            return [one.outcome for one in queries.incidents(history, queries.newest_job(history, "unseen").id)] == ["recovered"]

    wait_until(recovered, seconds=SECONDS, explain=place.log)
    assert place.state("unseen") == "RUNNING"
    assert not place.has_flow_run("unseen")
    (place.folder / "enough").touch()
    said, _ = child.communicate(timeout=SECONDS)
    assert (child.returncode, place.state("unseen")) == (0, "COMPLETED"), said + place.log()
    assert said.count(LATE) == 1
    gone(place)


@pytest.mark.long
def test_a_prefect_server_that_starts_late_gets_the_job(place: Place) -> None:
    """It is tried again: the flow takes over from the launcher, and the worker does not notice."""
    mended = late(place)
    child = place.start("run", place.job("seen-late", NAP))
    worker = place.worker()
    wait_until(lambda: LATE in texts(place, "seen-late"), seconds=SECONDS, explain=place.log)
    mended.touch()
    running(place, "seen-late")
    assert state_of(worker) not in "?Z"
    (place.folder / "enough").touch()
    said, _ = child.communicate(timeout=SECONDS)
    assert (child.returncode, place.state("seen-late")) == (0, "COMPLETED"), said + place.log()
    gone(place)


def test_a_script_that_cannot_start_fails_before_a_temporary_server_runs(silent: Place) -> None:
    """Nothing waits for Prefect: the command ends with the reason, once."""
    del silent.environment["PREFECT_API_URL"]
    status, said = silent.done("run", silent.job("cannot-first", "import no_such_module\n"))
    assert (status, silent.state("cannot-first")) == (1, "FAILED"), said
    assert said.count("so the script is at fault") == 1, said
    assert one_line_mentions(said, "job 'cannot-first' FAILED", "ModuleNotFoundError", "Install")
    assert "/cannot-first.py:1)" in said
    gone(silent)


@pytest.mark.long
def test_with_a_server_the_same_is_a_failed_flow_run_with_its_incident(place: Place, prefect_server: PrefectServer) -> None:
    """The launcher finds the fault, and the flow reports that the job failed."""
    status, said = place.done("run", place.job("fails-first", "import no_such_module\n"))
    assert (status, place.state("fails-first")) == (1, "FAILED"), said
    (run,) = asked(prefect_server, "flow_runs/filter", flow_runs={"name": {"any_": ["train fails-first"]}})
    assert run["state_type"] == "FAILED"
    assert mentions(run["state"]["message"], "ModuleNotFoundError", "Install")
    assert "/fails-first.py:1)" in run["state"]["message"]
    assert artifact(prefect_server, "fails-first-incident-1")["flow_run_id"] == run["id"]
    with closing(History.open(place.history, create=False)) as history:
        (incident,) = queries.incidents(history, queries.newest_job(history, "fails-first").id)
    assert incident.outcome == "failed"
    gone(place)


@pytest.mark.parametrize(("by", "status"), [pytest.param("command", 3, marks=pytest.mark.long), ("ctrl-c", 130)])
def test_a_job_is_stopped_while_its_launcher_controls_it(silent: Place, by: str, status: int) -> None:
    """By a command in another terminal, or by Ctrl-C in its own."""
    child = silent.start("run", silent.job(by, NAP))
    silent.worker()
    if by == "command":
        assert silent.done("stop", by)[0] == 0
    else:
        child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=SECONDS)
    assert (child.returncode, silent.state(by)) == (status, "CANCELLED"), said
    gone(silent)


def test_the_flow_takes_the_job_over_without_a_word(place: Place) -> None:
    """Its worker stays; the lease has a second epoch; nothing is reported that a user would have to understand."""
    child = place.start("run", place.job("passed", NAP))
    worker = place.worker()
    running(place, "passed")
    with closing(History.open(place.history, create=False)) as history:
        job = queries.newest_job(history, "passed")
        lease = holder_of(history, job.id)
        assert lease is not None
        assert lease.epoch == 2
        assert [one.number for one in queries.generations(history, job.id)] == [1]
    assert not [text for text in texts(place, "passed") if "reattached" in text or "detaches" in text]
    assert state_of(worker) not in "?Z"
    (place.folder / "enough").touch()
    said, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 0, said
    assert place.state("passed") == "COMPLETED"
    gone(place)
