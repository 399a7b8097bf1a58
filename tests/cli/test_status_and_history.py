"""The output of status, history and show."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from holdfast import exit_codes
from holdfast.detectors.training.progress import Pause
from holdfast.errors import UnknownIncident
from holdfast.history import FaultRecord, acquire, queries
from holdfast.history.health_samples import save_sweep
from holdfast.history.models import Generation
from holdfast.history.store import History
from holdfast.policies.nodes.node_health import FRESH, HealthAssessment
from holdfast.report.text.wording import decided
from tests.cli.conftest import Command, refused
from tests.cli.written_history import TRACEBACK, Author, an_incident_diagnosis
from tests.mentions import mentions, one_line_mentions


def test_status_lists_what_runs_and_only_that(here: Command, running: Author, book: History) -> None:
    """A job that ended is history."""
    ended = Author(book, "done", time.time() - 100)
    ended.move("COMPLETED", "all ended well", seconds=50)
    done = here("ps")
    head, row = done.stdout.splitlines()
    assert head.split()[:3] == ["JOB", "STATE", "STEP"]
    assert row.split()[:5] == ["gpt-small", "RESCHEDULING", "400", "of", "10,000"]
    assert "done" in here("ps", "-a").stdout


@pytest.fixture(autouse=True)
def _controllers_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the leases that these tests take, and do not renew, outlast a busy machine."""
    monkeypatch.setattr("holdfast.history.lease.LEASE_SECONDS", 600.0)


def test_an_empty_history_is_no_error(here: Command) -> None:
    """A new machine has no jobs; the hint says how to start one, and nothing is created."""
    for command in (["ps"], ["ps", "-a"]):
        done = here(*command)
        assert (done.returncode, done.stdout) == (0, "")
        assert "holdfast " in done.stderr
        assert json.loads(here(*command, "--json").stdout) == []


def test_status_shows_one_job_in_detail(here: Command, running: Author, book: History) -> None:
    """State and reason, generation, nodes, step, loss, rate, checkpoint, open incident, process and host of the controller."""
    acquire(book, running.job, holder="the flow of this test")
    text = here("status", "gpt-small").stdout
    for words in (
        "RESCHEDULING since",
        "restart 3 of 3 within 1 h",
        "400 of 10,000   4.0%",
        "10.00 steps/s",
        "3: 4 ranks on n0 (0–1), n2 (2–3)",  # noqa: RUF001 (a range)
        "step 100,",
        "incident 3 since",
        "worker-exception on rank 3 on n2",
        "steps lost  2",
        f"controller  pid {os.getpid()} on {os.uname().nodename}",
    ):
        assert words in text


def test_status_shows_unhealthy_nodes(here: Command, running: Author, book: History) -> None:
    """Present nodes of the job with fresh results; not those that it has left, and no old results."""
    now = time.time()
    cluster = running.job.cluster["name"]
    fields = {
        node: HealthAssessment(node=node, status=status, since=at, at=at, seen=at, reason=f"{node} is not well")
        for node, status, at in (("n0", "unhealthy", now), ("n1", "unhealthy", now), ("n2", "unreachable", now - 2 * FRESH))
    }
    save_sweep(book, cluster, fields, [], {})
    conditions = json.loads(here("status", "gpt-small", "--json").stdout)["conditions"]
    assert {node: (one["condition"], one["is_bad"]) for node, one in conditions.items()} == {"n0": ("fault", True)}, "of the open incident"
    text = here("status", "gpt-small").stdout
    assert ("n0 is not well" in text, "n1 is not well" in text, "n2 is not well" in text) == (True, False, False)


def test_status_shows_staleness_and_cost_of_snapshots(here: Command, running: Author) -> None:
    """As text and as numbers, as the ranks of the newest generation reported."""
    assert "snapshot    none yet" in here("status", "gpt-small").stdout
    assert json.loads(here("status", "gpt-small", "--json").stdout)["snapshots"] is None
    running.snapshots(2, step=149)
    running.snapshots(3, step=399, replica_step=398)
    text = here("status", "gpt-small").stdout
    assert one_line_mentions(text, "snapshot", "step 399", "1 step", "100 ms", "step 398")
    assert one_line_mentions(text, "every step", "95.0%", "0.5%")
    output = json.loads(here("status", "gpt-small", "--json").stdout)
    assert output["no_snapshots"] is None
    expected = {
        "step": 399, "age_steps": 1, "age_s": 0.1, "replica_step": 398, "interval_steps": 1, "overlapped": 0.95,
        "cost": pytest.approx(0.005),
    }  # fmt: skip
    assert {name: output["snapshots"][name] for name in expected} == expected
    running.move("COMPLETED", "all ended well", seconds=44)
    assert one_line_mentions(here("status", "gpt-small").stdout, "snapshot", "released", "step 399", "1 step")


def test_status_explains_a_missing_snapshot(here: Command, running: Author) -> None:
    """The fault that keeps state out of memory, with its evidence; of an old job that has ended, nothing."""
    quote = {"quote": "no memory store can be made in /dev/shm: No space left on device"}
    known: dict[str, Any] = {"recommended_action": "monitor", "attributed_to": "storage", "generation": 3, "evidence": quote}
    running.write(FaultRecord(job_id=running.job.id, at=running.zero, kind="memory-none", target="node n0", **known))
    why = f"none: memory-none on n0 ({quote['quote']})"
    assert f"snapshot    {why}" in here("status", "gpt-small").stdout
    assert json.loads(here("status", "gpt-small", "--json").stdout)["no_snapshots"] == why


def test_a_job_without_recorded_snapshots_shows_none(here: Command, book: History) -> None:
    """It has ended, and there is no record."""
    old = Author(book, "old", time.time() - 100)
    old.generation(1, {"n0": [0, 1]}, seconds=0.5)
    old.steps(1, 10, generation=1, seconds=1)
    old.move("COMPLETED", "all ended well", seconds=50)
    done = here("status", "old")
    assert done.returncode == 0
    assert "snapshot" not in done.stdout
    assert json.loads(here("status", "old", "--json").stdout)["no_snapshots"] is None


def test_status_shows_that_a_job_has_no_controller(here: Command, running: Author) -> None:
    """And how to have the job adopted."""
    assert one_line_mentions(here("status", "gpt-small").stdout, "controller", "none", "`holdfast run`")


def a_job_without_progress(book: History, *, ago: float) -> Author:
    """Give a job that made 60 steps, the last of them *ago* seconds ago, and runs by its record."""
    author = Author(book, "stuck", time.time() - ago - 20)
    author.generation(1, {"n0": [0, 1]}, seconds=0.5)
    author.move("RUNNING", "all 2 ranks run", seconds=2)
    author.steps(1, 60, generation=1, seconds=20 - 59 * 0.1)
    return author


def record_pause(author: Author, pause: Pause) -> None:
    """Record *pause* and the pids of the ranks with the job's generation, as its controller does."""
    with author.history.session() as session:
        row = session.get(Generation, f"{author.job.id}-1")
        assert row is not None
        row.facts = {"pids": {"0": 4711, "1": 4712}, "pause": pause.as_record()}


def test_a_job_that_makes_no_progress_is_no_healthy_job(here: Command, book: History) -> None:
    """Status, `ps` and JSON: since when, the rank that the others wait for and its pid; no rate, no ETA. Over with the next step."""
    author = a_job_without_progress(book, ago=60)
    acquire(book, author.job, holder="the flow of this test")
    cause = "rank 1 on n0 did not arrive at the vote on the step (rank 0 waits since 1.9 s)"
    pause = Pause(at=author.zero + 22, quiet=2.0, usual=0.1, hang_after=300.0, rank=1, node="n0", cause=cause)
    record_pause(author, pause)
    text = here("status", "stuck").stdout
    assert one_line_mentions(text, "warning", "no rank made progress for 1 min", "100 ms", cause, "reported", "5 min 00 s")
    assert one_line_mentions(text, "step", "60 of 10,000", "as of 1 min")
    assert one_line_mentions(text, "rate", "no step for 1 min")
    assert "ETA" not in text
    assert "steps/s" not in text
    row = here("ps").stdout.splitlines()[1]
    assert "no step for 1 min" in row
    assert "steps/s" not in row
    for output in (json.loads(here("status", "stuck", "--json").stdout), *json.loads(here("ps", "--json").stdout)):
        (warning,) = output["warnings"]
        assert warning == {"kind": "no-progress", "at": pause.at - 2.0, "target": "rank 1 on n0", "step": 60, "evidence": pause.text}
        assert (output["rate"], output["eta_s"], output["step_at"]) == (None, None, pytest.approx(author.zero + 20))
        assert output["stale_s"] > 60
        assert output["ranks"] == [{"rank": 0, "node": "n0", "pid": 4711}, {"rank": 1, "node": "n0", "pid": 4712}]
    author.steps(61, 70, generation=1, seconds=time.time() - author.zero - 1)
    output = json.loads(here("status", "stuck", "--json").stdout)
    assert (output["warnings"], output["stale_s"]) == ([], None)
    assert output["rate"] == pytest.approx(10, rel=0.01)
    assert output["eta_s"] > 0


def test_without_a_controller_numbers_are_shown_with_their_age(here: Command, book: History) -> None:
    """The ranks may train on: the rate is that of before, and there is no ETA."""
    a_job_without_progress(book, ago=60)
    text = here("status", "stuck").stdout
    assert one_line_mentions(text, "step", "60 of 10,000", "as of 1 min")
    assert one_line_mentions(text, "rate", "10.00 steps/s as of 1 min")
    assert "ETA" not in text
    output = json.loads(here("status", "stuck", "--json").stdout)
    assert (output["rate"], output["eta_s"], output["flow"]) == (pytest.approx(10), None, None)
    assert output["stale_s"] > 60
    assert output["warnings"] == []
    assert [one["pid"] for one in output["ranks"]] == [None, None], "no controller has recorded them"


def test_a_step_that_takes_long_is_no_old_one(here: Command, book: History) -> None:
    """Steps of 40 s, the newest of them 60 s ago."""
    author = Author(book, "slow", time.time() - 300)
    author.generation(1, {"n0": [0]}, seconds=0.5)
    author.move("RUNNING", "1 rank runs", seconds=2)
    author.steps(1, 5, generation=1, seconds=80, each=40.0)
    output = json.loads(here("status", "slow", "--json").stdout)
    assert output["stale_s"] is None
    assert output["eta_s"] > 0
    assert one_line_mentions(here("status", "slow").stdout, "ETA", "5 of 10,000")


def test_hints_name_a_run_by_its_id_once_its_name_is_that_of_a_newer_one(here: Command, running: Author, book: History) -> None:
    """Each hint can be typed as it stands, and finds the run that it is about; an unknown incident is refused with the run in the text."""
    old = running.job.id
    assert mentions(here("incidents", "gpt-small").stderr, "`holdfast incidents show N --job gpt-small`")
    newer = Author(book, "gpt-small", time.time())
    newer.move("RUNNING", "every worker made its first step", seconds=0)
    for command in (("incidents", old), ("status", old, "--events")):
        assert mentions(here(*command).stderr, f"`holdfast incidents show N --job {old}`")
    assert f"`holdfast incidents {old}` lists them" in here("status", old).stdout
    assert mentions(here("incidents", "show", "3", "--job", old).stdout, "gpt-small, incident 3")
    done = here("incidents", "show", "3", "--job", "gpt-small")
    assert refused(done, UnknownIncident("3", "gpt-small", newer.job.id))
    assert one_line_mentions(done.stderr, "no incident '3'", newer.job.id, "job 'gpt-small'", "`holdfast ps -a`")


def test_programs_get_the_same_as_json(here: Command, running: Author) -> None:
    """Numbers as numbers, times in seconds since 1970."""
    (listed,) = json.loads(here("ps", "--json").stdout)
    output = json.loads(here("status", "gpt-small", "--json").stdout)
    assert listed["id"] == output["id"] == running.job.id
    assert output["step"] == 400
    assert output["until"] == 10_000
    assert output["rate"] == pytest.approx(10)
    assert output["nodes"] == {"n0": [0, 1], "n2": [2, 3]}
    assert output["checkpoint"]["step"] == 100
    assert output["incident"]["number"] == 3
    assert output["eta_s"] is None
    assert output["submitted"] == pytest.approx(running.zero)


def test_a_job_that_runs_has_an_eta(here: Command, running: Author) -> None:
    """Steps left over steps a second."""
    running.move("RUNNING", "every worker made its first step", seconds=44)
    assert json.loads(here("status", "gpt-small", "--json").stdout)["eta_s"] == pytest.approx(960)


def test_a_loss_that_is_nan_is_null_in_json(here: Command, book: History) -> None:
    """JSON has no NaN, and not every program reads it."""
    author = Author(book, "nan", time.time() - 10)
    author.steps(1, 3, generation=1, seconds=1, loss=float("nan"))
    done = here("status", "nan", "--json")
    assert "NaN" not in done.stdout
    assert json.loads(done.stdout)["loss"] is None
    assert "nan" in here("status", "nan").stdout


def test_a_checkpoint_found_corrupt_is_not_the_newest(here: Command, running: Author) -> None:
    """The one before it is."""
    running.checkpoint(200, seconds=30)
    running.checkpoint(200, seconds=40, problem="checkpoint-corrupt")
    assert json.loads(here("status", "gpt-small", "--json").stdout)["checkpoint"]["step"] == 100


def test_a_final_state_that_was_not_saved_is_no_clean_success(here: Command, book: History) -> None:
    """The summary and the status say so, with the reason and the newest checkpoint; a later save of the same step ends that."""
    job = Author(book, "full", time.time() - 60)
    job.generation(1, {"n0": [0, 1]}, seconds=1, until=192)
    job.steps(1, 192, generation=1, seconds=2)
    job.checkpoint(40, seconds=6)
    job.checkpoint(192, seconds=22, problem="checkpoint-disk-full")
    job.move("COMPLETED", "all 2 ranks exited with status 0", seconds=23, event="finished")
    for command, code in (("status full --follow", exit_codes.NOT_SAVED), ("status full", 0)):
        done = here(*command.split())
        assert done.returncode == code
        text = done.stdout
        assert one_line_mentions(text, "NOT SAVED", "final state", "step 192", "checkpoint-disk-full", "step 40"), text
    assert one_line_mentions(here("status", "full", "--follow").stdout, "checkpoint", "step 40 of 192")
    output = json.loads(here("status", "full", "--json").stdout)
    assert (output["failed_save"]["step"], output["checkpoint"]["step"]) == (192, 40)
    job.checkpoint(192, seconds=24)
    output = json.loads(here("status", "full", "--json").stdout)
    assert (output["failed_save"], output["checkpoint"]["step"]) == (None, 192)
    done = here("status", "full", "--follow")
    assert ("NOT SAVED" in done.stdout, done.returncode) == (False, 0)


def test_the_last_step_is_that_of_the_newest_generation(here: Command, running: Author) -> None:
    """One that has not reported it yet inherits it."""
    running.generation(4, {"n0": [0, 1]}, seconds=44, until=None)
    assert json.loads(here("status", "gpt-small", "--json").stdout)["until"] == 10_000


def test_history_of_a_job_is_in_order(here: Command, running: Author) -> None:
    """Moves, generations, decisions with their reason, remarks; then the incidents."""
    running.checkpoint(200, seconds=20, problem="checkpoint-corrupt")
    lines = here("status", "gpt-small", "--events").stdout.splitlines()
    life = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  ") and ":" in line]
    assert life[0] == "LAUNCHING: submitted"
    assert decided(1, "restart-workers", "restart 1 of 3 within 1 h") in life
    assert "spare n3 is gone; 0 spares left" in life
    assert any(line.startswith("checkpoint-corrupt") for line in life)
    assert life.index("generation 1: 4 ranks on n0, n1") < life.index("generation 2: 4 ranks on n0, n1")
    assert sum("worker-sigkill" in line and "310 ms" in line for line in lines) == 1


def test_history_as_json_has_every_row(here: Command, running: Author) -> None:
    """By kind."""
    output = json.loads(here("status", "gpt-small", "--events", "--json").stdout)
    assert [len(output[kind]) for kind in ("generations", "transitions", "decisions", "checkpoints", "job_events")] == [3, 5, 3, 1, 1]
    assert json.loads(here("ps", "-a", "--json").stdout)[0]["job"] == "gpt-small"


def test_an_earlier_run_is_found_by_its_id(here: Command, running: Author, book: History) -> None:
    """A name means the newest run, an id or its beginning the very one."""
    again = Author(book, "gpt-small", time.time())
    again.incident(1, "node-lost", "node n9", seconds=0)
    assert json.loads(here("status", "gpt-small", "--json").stdout)["id"] == again.job.id
    assert json.loads(here("status", running.job.id[:20], "--json").stdout)["id"] == running.job.id
    assert json.loads(here("incidents", "show", "1", "--job", running.job.id, "--json").stdout)["kind"] == "worker-sigkill"
    assert json.loads(here("incidents", "show", "1", "--json").stdout)["kind"] == "node-lost"


def test_show_has_faults_decisions_and_phases(here: Command, running: Author) -> None:
    """With the reason, what was passed over, and the phases T0 to T4."""
    text = here("incidents", "show", "1", "--job", "gpt-small").stdout
    for words in (
        "worker-sigkill on rank 1 on n0, recovered",
        "310 ms",
        "ended by signal 9 (SIGKILL)",
        "restart-workers: restart 1 of 3",
        "skipped fail the job",
    ):
        assert words in text
    for term in ("T0 rollback", "T1 reschedule", "T2 communication", "T3 load", "T4 warm-up and compile"):
        assert term in text


def test_show_has_hypotheses_with_their_evidence(here: Command, running: Author, book: History) -> None:
    """The newest diagnosis counts: each hypothesis with its confidence, its evidence with time and source, what it leaves unexplained."""
    (incident, *_) = queries.incidents(book, running.job.id)
    running.write(an_incident_diagnosis(incident, 0.4), an_incident_diagnosis(incident, 0.8))
    text = here("incidents", "show", "1", "--job", "gpt-small").stdout
    for named in (
        ("80.0%", "gpu-off-bus", "n1", "gpu"),
        ("kernel log", "n1", "NVRM: Xid 79"),
        ("explains", "worker-peer-lost", "rank 0", "n0", 999),
        ("unexplained", "worker-sigkill", "rank 5", "n2"),
        ("20.0%", "worker-sigkill", "rank 5", "n2"),
        ("matched by", "xid.toml"),
        ("acts", "yes (evict)", "the line proves it"),
        ("what to do", "replace the node"),
        ("reference", "https://docs.nvidia.com/deploy/xid-errors"),
        ("would change this", "a worker's output", "monitor"),
        ("acts: no", "this kind takes no node out of service", "matched by what was measured"),
    ):
        assert one_line_mentions(text, *named), named
    assert "40.0%" not in text
    output = json.loads(here("incidents", "show", "1", "--job", "gpt-small", "--json").stdout)["diagnoses"]
    assert [one["candidates"][0]["confidence"] for one in output] == [0.4, 0.8]


def test_show_quotes_a_complete_traceback(here: Command, running: Author) -> None:
    """Line by line, as it was."""
    text = here("incidents", "show", "3", "--job", "gpt-small").stdout
    for line in TRACEBACK.splitlines():
        assert f"│ {line}" in text
    (fault,) = json.loads(here("incidents", "show", "3", "--job", "gpt-small", "--json").stdout)["faults"]
    assert fault["evidence"]["detail"] == TRACEBACK


def test_show_quotes_a_traceback_once(here: Command, running: Author, book: History) -> None:
    """Each fault that it belongs to refers to it; repeated text would hide the differences."""
    incident = queries.incidents(book, running.job.id)[2]
    (fault,) = queries.faults(book, incident_id=incident.id)
    running.write(FaultRecord(**{**fault.model_dump(), "id": "f" * 24, "kind": "user-error", "at": fault.at + 1}))
    text = here("incidents", "show", "3", "--job", "gpt-small").stdout
    assert text.count(TRACEBACK.splitlines()[-1]) == 1
    assert one_line_mentions(text, "detail", "worker-exception", "rank 3", "n2", "above")


@pytest.mark.parametrize("words", [["ps"], ["ps", "--json"], ["ps", "-a", "--json"]], ids=" ".join)
def test_a_list_takes_as_many_queries_for_many_jobs_as_for_one(words: list[str], here: Command, book: History) -> None:
    """Each of them takes a round trip to a PostgreSQL server."""
    queries: list[str] = []

    def listed(jobs: int) -> tuple[int, int]:
        queries.clear()
        done = here(*words)
        assert sum(f"job-{number}" in done.stdout for number in range(jobs)) == jobs, done.stderr
        return jobs, len(queries)

    def count(*given: object) -> None:
        queries.append(str(given[2]))

    event.listen(Engine, "before_cursor_execute", count)
    try:
        counts = []
        for number in range(3):
            author = Author(book, f"job-{number}", time.time() - 60)
            author.generation(1, {"n0": [0, 1]}, seconds=1)
            author.move("RUNNING", "it trains", seconds=2)
            author.steps(1, 10 + number, generation=1, seconds=3)
            counts.append(listed(number + 1))
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    assert [queries for _, queries in counts] == [counts[0][1]] * 3
    assert counts[0][1] > 0


def test_nodes_shows_present_and_recorded_states(here: Command, running: Author) -> None:
    """A new local cluster has nodes without agents; the history may have cordons of one."""
    running.node("node-1", "excluded", "hangs too often", seconds=20)
    done = here("node", "ls")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 5
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("node-1"))
    assert "excluded" in row
    assert "hangs too often" in row
    output = json.loads(here("node", "ls", "--json").stdout)["nodes"]
    assert [node["agent"] for node in output] == ["down"] * 4
    assert output[1]["history"]["status"] == "excluded"


def test_a_report_is_written_to_the_given_file(here: Command, running: Author) -> None:
    """The output is its path."""
    done = here("report", "gpt-small", "-o", "page.html")
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip())
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_without_steps_the_status_names_the_logs(here: Command, book: History) -> None:
    """A script without Holdfast's API trains as well, and reports no steps. A new job gets time to report the first."""
    author = Author(book, "plain", time.time() - 60)
    author.move("RUNNING", "all 2 ranks are at work", seconds=1)
    words = "`holdfast logs plain --follow` shows"
    shown = here("status", "plain").stdout
    assert one_line_mentions(shown, "step", "none reported", "holdfast.heartbeat")
    assert words in shown
    assert "snapshot" not in shown, "nobody knows yet whether the script has a session"
    author.move("RUNNING", "all 2 ranks are at work", seconds=59)
    assert words not in here("status", "plain").stdout


def test_the_history_marks_incidents_and_counts_repeated_notes(holdfast: Command, running: Author) -> None:
    """Begin and end of each incident are marked; eleven notes of one cause are one line with the time of the last."""
    for number in range(11):
        running.record_event(f"rank 1 on n0 (host-overloaded): watched; staying costs {15 + number} ms a step", seconds=20 + number)
    lines = holdfast("status", "gpt-small", "--events").stdout.splitlines()
    notes = [line for line in lines if "host-overloaded" in line]
    assert len(notes) == 1
    assert mentions(notes[0], "15 ms", "11 times")
    assert re.search(r"last at \d\d:\d\d:\d\d\)$", notes[0])
    begun, over = ([line for line in lines if line.startswith(mark)] for mark in ("! ", "= "))
    targets = (("worker-sigkill", "rank 1", "n0"), ("node-lost", "n1"), ("worker-exception", "rank 3", "n2"))
    for number, (line, target) in enumerate(zip(begun, targets, strict=True), start=1):
        assert mentions(line, f"incident {number}", "20 ms", *target)
    for number, (line, action) in enumerate(zip(over, ("restart-workers", "replace-node"), strict=True), start=1):
        assert mentions(line, f"incident {number}", action, "310 ms", "2 steps", f"generation {number + 1}")
    assert any(line.endswith("RESCHEDULING") for line in lines), "the reason that the decision gave is not repeated"


def test_an_incident_after_which_no_rank_reported_its_state_has_no_line_for_it(here: Command, book: History) -> None:
    """What restarted are processes of a script without a session; what else is known of the incident is no state."""
    author = Author(book, "plain", time.time() - 100)
    one = author.incident(1, "worker-sigkill", "rank 1 on n1", seconds=10)
    one.facts = {"got_on": True, "down_until": "started"}
    with book.session() as session:
        session.merge(one)
    done = here("incidents", "show", "1", "--job", "plain")
    assert "downtime" in done.stdout
    assert not any(line.split() == ["state"] for line in done.stdout.splitlines())
