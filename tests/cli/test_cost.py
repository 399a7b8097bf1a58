"""`holdfast cost` and `holdfast policy replay` as their users meet them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import DecidedCase, DecisionRecord, queries
from holdfast.history.store import History
from holdfast.policies.recovery.case_codec import act_of, to_record
from holdfast.policies.recovery.escalation import POLICIES, decide
from tests.cli.conftest import Command
from tests.cli.written_history import Author
from tests.mentions import mentions, one_line_mentions
from tests.policies.cases import a_case
from tests.report import filled
from tests.report.parsed import Page

WIDE = 100


def test_the_cost_is_shown_in_tables_that_fit(here: Command, book: History) -> None:
    """Categories, ETTR, MTTF and MTTR with their basis, losses by phase and fault, nodes."""
    filled.three_incidents(book)
    text = here("cost", "bytes-gpt").stdout
    for named in (
        ("bytes-gpt", "2026-09-21 14:13:20 UTC"),
        ("compute-hours", "every rank"),
        ("ETTR", "78.3%"),
        ("steps lost", 71),
        ("MTTR", "1.73 s", "3 recoveries"),
        ("Lost, by phase",),
        ("T0 rollback", "thrown away"),
        ("Lost, by kind of fault",),
        ("Nodes, by the cost",),
    ):
        assert one_line_mentions(text, *named), named
    assert max(map(len, text.splitlines())) <= WIDE


def test_the_parts_that_programs_get_add_up(here: Command, book: History) -> None:
    """Categories to the total, phases and faults to the lost hours, jobs to all."""
    filled.three_incidents(book)
    output = json.loads(here("cost", "--json").stdout)
    assert sum(output["categories"].values()) == pytest.approx(output["hours"])
    assert sum(output["phases"].values()) == pytest.approx(output["categories"]["lost to failures"])
    assert sum(one["hours"] for one in output["faults"]) == pytest.approx(output["categories"]["lost to failures"])
    assert sum(one["hours"] for one in output["jobs"]) == pytest.approx(output["hours"])
    assert (output["unit"], output["failures"], output["recoveries"], output["user_errors"]) == ("compute-hours", 3, 3, 0)
    assert output["nodes"][0] == {
        "node": "node-1",
        "faults": 3,
        "incidents": 2,
        "attributed": 1,
        "hours": pytest.approx(0.009515, rel=1e-3),
        "worst": "worker-stopped",
        "to_quarantine": False,
    }


def test_the_cost_of_a_running_job_is_shown(here: Command, running: Author) -> None:
    """A job without a controller counts until its last sign of life, which is noted."""
    text = " ".join(here("cost", "gpt-small").stdout.split())
    assert mentions(text, "1 job without a controller")
    assert here("cost", "gpt-small", "--since", "1s").returncode == 0


def test_without_reported_steps_running_is_neither_startup_nor_lost(here: Command, book: History, tmp_path: Path) -> None:
    """Of an unmodified script the launch and the downtime are known; what its ranks did in between is not, on any page."""
    job = Author(book, "plain", time.time() - 100)
    job.move("LAUNCHING", "submitted", seconds=0, event="submitted")
    job.generation(1, {"n0": [0, 1]}, seconds=1, until=None)
    job.move("RUNNING", "all 2 ranks run", seconds=20)  # as late as the flow of Prefect has started
    job.incident(1, "worker-sigkill", "rank 1 on n0", seconds=30)
    job.generation(2, {"n0": [0, 1]}, seconds=30.2, until=None)
    job.move("COMPLETED", "all 2 ranks exited with status 0", seconds=50, event="finished", generation=2)
    categories = json.loads(here("cost", "plain", "--json").stdout)["categories"]
    spent = {name: round(hours * 3600, 2) for name, hours in categories.items() if hours}
    assert spent == {"startup": 2.0, "steps unknown": 97.38, "lost to failures": 0.62}
    text = here("cost", "plain").stdout
    assert one_line_mentions(text, "productive", "not known")
    assert not one_line_mentions(text, "productive", "0.0%")
    assert here("cost", "plain", "-o", str(tmp_path / "cost.html")).returncode == 0
    words = Page((tmp_path / "cost.html").read_text()).root.words
    assert mentions(words, "no steps were reported", "what was kept is not known")
    assert " 0.0% went into" not in words


def test_a_job_that_launches_has_not_run(here: Command, book: History) -> None:
    """Until its ranks run, all of its time is startup: they may still report steps."""
    job = Author(book, "young", time.time() - 10)
    job.move("LAUNCHING", "submitted", seconds=0, event="submitted")
    job.generation(1, {"n0": [0, 1]}, seconds=1, until=None)
    categories = json.loads(here("cost", "young", "--json").stdout)["categories"]
    assert categories["startup"] > 0
    assert categories["steps unknown"] == 0


def test_an_empty_history_costs_nothing(here: Command) -> None:
    """Said, with what to do; programs get zeros."""
    done = here("cost")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no job" in done.stderr
    assert json.loads(here("cost", "--json").stdout)["hours"] == 0


@pytest.mark.parametrize("command", [("cost",), ("policy", "replay", "patient")])
def test_an_invalid_time_is_refused_with_examples(command: tuple[str, ...], here: Command) -> None:
    """Field, value, cure; nothing is guessed."""
    done = here(*command, "--since", "yesterday")
    assert done.returncode == 2
    assert "'yesterday'" in done.stderr
    assert '"7d"' in done.stderr


def test_since_takes_a_date_or_a_duration(here: Command, book: History) -> None:
    """The job of another year is not there since last week; it is since the day it ran."""
    filled.three_incidents(book)
    assert json.loads(here("cost", "--since", "2026-09-21", "--json").stdout)["failures"] == 3
    assert json.loads(here("cost", "--since", "2026-10-01T12:00", "--json").stdout)["jobs"] == []
    assert json.loads(here("cost", "--since", "1h", "--json").stdout)["hours"] == 0


@pytest.mark.parametrize("name", ["c.html", "c.svg", "c.png"])
def test_the_bill_is_drawn(name: str, here: Command, book: History, tmp_path: Path) -> None:
    """One self-contained file with the same text as the terminal."""
    filled.three_incidents(book)
    done = here("cost", "bytes-gpt", "-o", name)
    assert done.stdout.splitlines()[-1] == str(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    if name.endswith("html"):
        root = Page(content.decode()).root
        words = " ".join(root.words.split())
        uses, losses = root.find("ul", class_="legend")
        assert len(uses.find("li")) <= 10, "each picture has its own legend and its own scale"
        assert re.search(r"lost to failures [\d.]+ (?:s|min|h).*?, [\d.]+%", uses.words), "a piece too thin to be seen is given in numbers"
        assert len(losses.find("li")) > 2
        for expected in ("78.3%", "worker-stopped", "steps thrown away", "node-1", "over 3 recoveries"):
            assert expected in words
        assert b"http://" not in content.replace(b"http://www.w3.org", b"")
    else:
        assert content[:8] == b"\x89PNG\r\n\x1a\n" or b"<svg" in content


def test_a_picture_of_another_kind_is_refused(here: Command) -> None:
    """Before anything is read."""
    done = here("cost", "-o", "cost.pdf")
    assert done.returncode == 2
    assert "Choose one of them" in done.stderr


def decided(book: History, job: str, kind: str = "worker-sigkill") -> None:
    """Write a decision of the balanced policy; for a killed worker the aggressive one decides differently."""
    case = a_case(kind, "a", spares=("d",))
    answer, incident = decide(POLICIES["balanced"], case), queries.incidents(book, job)[0]
    made: dict[str, Any] = {"action": answer.decision.action, "rule": answer.rule, "reason": answer.decision.reason}
    with book.session() as session:
        row = DecisionRecord(job_id=job, incident_id=incident.id, at=time.time(), act=act_of(answer.decision), **made)
        session.add_all([row, DecidedCase(decision_id=row.id, job_id=job, record=to_record(case))])


def test_replay_shows_what_another_policy_would_have_decided(here: Command, running: Author, book: History) -> None:
    """The decision, its reason and value, or why that is unknown, and the decisions that cannot be replayed."""
    decided(book, running.job.id)
    text = here("policy", "replay", "aggressive", "--job", "gpt-small").stdout
    assert one_line_mentions(text, "aggressive", "4 decisions", "3 incidents")
    assert mentions(text, "different", "restart-workers", "replace-node", "d replaces a")
    assert one_line_mentions(text, 3, "before cases were recorded")
    assert max(map(len, text.splitlines())) <= WIDE
    output = json.loads(here("policy", "replay", "aggressive", "--json").stdout)
    assert list(output["unreadable"].values()) == [3]
    assert output["differences"][0]["would"]["act"]["add"] == ["d"]
    same = json.loads(here("policy", "replay", "balanced", "--json").stdout)
    assert (same["same"], same["differences"], same["hours_saved"]) == (1, [], 0.0)


def test_replay_refuses_an_unknown_policy(here: Command, book: History) -> None:
    """The error lists the known ones; an empty history is not an error."""
    done = here("policy", "replay", "bold")
    assert done.returncode == 2
    assert "patient, balanced, aggressive" in done.stderr
    done = here("policy", "replay", "patient")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no decision" in done.stderr


@pytest.mark.parametrize("kind", ["unknown", "gpu-off-bus", "user-error"])
def test_replay_knows_every_kind_of_fault(kind: str, holdfast: Command, running: Author, book: History) -> None:
    """In a new process, which has not loaded the catalogue."""
    decided(book, running.job.id, kind)
    output = json.loads(holdfast("policy", "replay", "balanced", "--json").stdout)
    assert (output["same"], list(output["unreadable"].values())) == (1, [3])
