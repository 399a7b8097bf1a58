"""Scripts that keep their own state: steps by heartbeat or none at all, and what every view says that a fault cost them."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.accounting.losses import UNTIL_STEP, losses
from holdfast.history import History, Incident, queries
from holdfast.plurals import plural
from holdfast.report.text.wording import duration, share
from tests.integration.conftest import PrefectServer
from tests.integration.test_run_command import Place, gone
from tests.mentions import mentions

pytestmark = pytest.mark.long

TRAIN = """
import os, pathlib, signal, time
{imports}
rank, first_life = os.environ["RANK"], os.environ["HOLDFAST_GENERATION"] == "1"
own = pathlib.Path("own")
step = int(own.read_text()) if own.exists() else 0
print("goes on after", step)
while step < 40:
    time.sleep(0.03)
    step += 1
    {heartbeat}
    if step % 8 == 0 and rank == "0":
        own.with_suffix(".new").write_text(str(step))
        own.with_suffix(".new").replace(own)
    while first_life and step == 21:
        time.sleep(0.03)
        pathlib.Path("waits-" + rank).touch()
        if rank == "1" and pathlib.Path("waits-0").exists() and own.read_text() == "16":
            os.kill(os.getpid(), signal.SIGKILL)
"""
HEARTBEAT = TRAIN.format(imports="import holdfast", heartbeat="holdfast.heartbeat(step, 1.0 / step, until=40)")
SILENT = TRAIN.format(imports="", heartbeat="pass")
FAST = "nproc_per_node: 2\nchecks: {nodes: false}\n"


@pytest.fixture
def place(tmp_path: Path, holdfast_home: Path, prefect_server: PrefectServer) -> Place:
    """Give a place for jobs, with a Prefect server at hand so that flows start fast."""
    return Place(tmp_path, holdfast_home, prefect_server)


def only_incident(history: History, job: str) -> Incident:
    """Return the one incident of a job."""
    (one,) = queries.incidents(history, queries.newest_job(history, job).id)
    return one


def test_a_framework_that_keeps_its_own_state_reports_steps_and_every_view_says_the_same(place: Place) -> None:
    """A rank is killed: it resumes from the script's own checkpoint, nothing is restored; lost steps, downtime and ETTR count alike."""
    status, said = place.done("run", place.job("beats", HEARTBEAT, FAST))
    assert status == 0, said + place.log()
    with closing(History.open(place.history, create=False)) as history:
        job = queries.newest_job(history, "beats")
        one, steps = only_incident(history, "beats"), queries.steps(history, job.id)
        phases = {phase.name for phase in queries.phases(history, one.id)}
        found = losses(history, job)
        assert not queries.checkpoints(history, job.id)
        assert not queries.snapshots(history, job.id)
    assert (one.kind, one.outcome) == ("worker-sigkill", "recovered")
    again = [step for step in steps if step.generation == 2]
    assert (one.resumed_step, again[0].step, steps[-1].step) == (16, 17, 40)
    assert (one.step_before, one.steps_lost) == (21, 5)
    assert "reschedule" in phases
    assert phases.isdisjoint({"communication", "load", "warm-up"}), "nobody reported these parts"
    assert "goes on after 16" in Path(job.directory, "logs", "rank-0.log").read_text()

    assert (found.steps_lost, found.until) == (len([step for step in steps if step.generation == 1 and step.step > 16]), (UNTIL_STEP,))
    assert found.downtime_s == pytest.approx(one.downtime_s, abs=1e-5)
    shown, lost = (share(found.ettr), duration(found.downtime_s)), plural(found.steps_lost or 0, "step")
    for command in (["status", "beats"], ["status", "beats", "--events"], ["cost", "beats"]):
        text = " ".join(place.done(*command)[1].split())
        assert mentions(text, f"ETTR {shown[0]}", f"downtime {shown[1]}", f"steps lost {found.steps_lost}"), text
    words = f"{shown[1]} of downtime, {lost} lost, ETTR {shown[0]}"
    assert re.search(rf"incidents +1: {re.escape(words)}$", said, re.MULTILINE), said
    place.done("report", "beats", "-o", "page.html")
    page = re.sub(r"<[^>]+>", " ", (place.folder / "page.html").read_text())
    assert words in " ".join(page.split())
    gone(place)


def test_of_a_script_without_steps_nothing_is_claimed_that_nobody_knows(place: Place) -> None:
    """No steps lost, no ETTR, no parts of a recovery; and the downtime says that it ends with the start of the processes."""
    status, said = place.done("run", place.job("silent", SILENT, FAST))
    assert status == 0, said + place.log()
    with closing(History.open(place.history, create=False)) as history:
        one = only_incident(history, "silent")
        phases = {phase.name for phase in queries.phases(history, one.id)}
    assert (one.outcome, one.steps_lost, one.until_started) == ("recovered", None, True)
    assert "reschedule" in phases
    assert phases.isdisjoint({"communication", "load", "warm-up", "rollback"})
    text = " ".join(place.done("status", "silent")[1].split())
    assert mentions(text, "ETTR not known", f"downtime {duration(one.downtime_s)}", "steps lost not known"), text
    measured = (
        f"{duration(one.downtime_s)} of downtime (each from the fault until all processes had started: training may have begun later)"
    )
    assert re.search(rf"incidents +1: {re.escape(measured)}$", said, re.MULTILINE), said
    assert " 0 steps" not in said + text
    assert "reported no step" not in said, "it printed its steps, was recovered and went on: nothing is suspicious"
    assert "holdfast.session does" not in text
    bill = json.loads(place.done("cost", "silent", "--json")[1])
    assert bill["categories"]["steps unknown"] > 0
    assert one.downtime_s is not None
    assert bill["categories"]["lost to failures"] * 3600 == pytest.approx(2 * one.downtime_s, abs=1e-3), "of both ranks, and no warm-up"
    gone(place)
