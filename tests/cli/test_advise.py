"""`holdfast checkpoint advise`: the figures, the advice, what other cadences cost, and what is assumed when little was measured."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from holdfast.history.models import Checkpoint, Generation, JobTransition, Phase, StepRecord
from holdfast.history.store import History
from holdfast.policies.checkpoint_interval import PUBLISHED, IntervalCase, IntervalLimits, advise, daly, rate_of, waste
from tests.cli.conftest import Command
from tests.cli.written_history import PHASES, Author
from tests.mentions import mentions, one_line_mentions

NOW = time.time()
DOWN = sum(seconds for name, seconds in PHASES.items() if name != "rollback")


def a_long_job(book: History, *, faults: int = 4, saves: int = 12, steps: int = 300, plan: dict[str, Any] | None = None) -> Author:
    """Write a job of 50 hours on two nodes, steps of two seconds and saves of three, which has ended."""
    author = Author(book, "gpt-large", NOW - 60 * 3600)
    author.job.spec["checkpoint"] = plan or {"interval": 50}
    ranks = {"n0": [0, 1, 2, 3], "n1": [4, 5, 6, 7]}
    one = Generation(job_id=author.job.id, number=1, at=author.zero, ended_at=author.zero + 50 * 3600, world_size=8, ranks=ranks)
    author.write(one, *(StepRecord(job_id=author.job.id, generation=1, step=step, at=NOW, seconds=2.0) for step in range(1, steps + 1)))
    author.write(
        *(
            Checkpoint(job_id=author.job.id, at=NOW, step=50 * number, generation=1, path=f"/c/{number}", seconds=3.0)
            for number in range(1, saves + 1)
        )
    )
    for number in range(1, faults + 1):
        author.incident(number, "node-lost", "node n1", seconds=number * 600, action="replace-node")
    author.write(
        JobTransition(job_id=author.job.id, at=NOW, before="RUNNING", event="finished", after="COMPLETED", reason="done", generation=1)
    )
    return author


@pytest.fixture
def long(book: History) -> Author:
    """Give a job that has been measured well."""
    author = a_long_job(book)
    with book.session() as session:
        session.merge(author.job)
    return author


def test_the_figures_are_those_of_the_history(here: Command, long: Author) -> None:
    """Node-hours, faults, medians; the case, the advice and the waste follow by the policy's own sums."""
    output = json.loads(here("checkpoint", "advise", "gpt-large", "--json").stdout)
    assert output["measured"]["fleet"]["node_hours"] == pytest.approx(100)
    assert (output["measured"]["saves"], output["measured"]["save_s"]) == (12, 3.0)
    assert (output["measured"]["steps"], output["measured"]["step_s"]) == (300, 2.0)
    rate = rate_of(4, 100.0)
    assert output["rate"]["per_node_hour"] == pytest.approx(4.5 / 100)
    assert output["rate"]["between_s"] == pytest.approx(3600 / 0.045 / 2)
    case = IntervalCase(save_s=3.0, step_s=2.0, between_s=rate.between_s(2), rollback=4.5 / 5, recovery_s=DOWN)
    known = {"save_s": 3.0, "step_s": 2.0, "between_s": 40_000, "rollback": 0.9, "recovery_s": DOWN, "overlapped_s": 0}
    assert output["case"] == pytest.approx(known)
    best = advise(case, IntervalLimits(least=10, most=10_000))
    assert output["advised"]["steps"] == best.steps == pytest.approx(daly(3.0, 40_000 / 0.9) / 2, abs=1)
    now, then = waste(case, 50), waste(case, best.steps)
    assert output["present"]["every"] == 50
    assert output["present"]["waste"]["total"] == pytest.approx(now.total)
    assert output["present"]["waste"]["compute_hours_a_day"] == pytest.approx(now.total * 24 * 8)
    assert min(output["table"], key=lambda row: row["total"])["steps"] == best.steps
    assert then.total < now.total


def test_the_text_output_has_the_same_numbers(here: Command, long: Author) -> None:
    """With its reasons, in lines that fit an ordinary terminal."""
    done = here("checkpoint", "advise", "gpt-large", "--interval", "77")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, lines)) <= 80
    assert mentions(lines[0], "gpt-large", "50 steps", "job file")
    for named in (
        ("one save", "3.00 s", "12 saves"),
        ("one step", "2.00 s", "300 steps"),
        ("faults", "4 faults", "100 node-hours", "1 job"),
        ("2 nodes", "8 ranks", "11 h 06 min"),
        ("recoveries", "4 by replace-node", "4 of 4", "checkpoint"),
        ("257 steps", "8 min 34 s"),
        ("One fault", "3 min 53 s"),
    ):
        assert one_line_mentions(done.stdout, *named), named
    rows = {line.split()[0]: line.split() for line in lines if line[:1].isdigit()}
    assert list(rows) == ["50", "64", "77", "128", "257", "514", "1,028"]
    assert rows["50"][-1] == "now"
    assert rows["257"][-1] == "advised"
    assert rows["257"][-6:-1] == ["0.6%", "0.6%", "0.0%", "1.2%", "2.22"]
    shown = " ".join(done.stdout.split())
    assert "T0 rollback 3 min 52" in shown
    assert "T2 communication 50 ms" in shown
    assert "T4 warm-up and compile 70 ms" in shown
    assert "auto}`" in done.stdout


def test_a_script_with_its_own_interval_is_measured(here: Command, long: Author, book: History) -> None:
    """Not by what the job file says."""
    saved = [Checkpoint(job_id=long.job.id, at=NOW, step=7 * n, generation=2, path=f"/d/{n}", seconds=3.0) for n in range(1, 4)]
    long.write(*saved)
    output = json.loads(here("checkpoint", "advise", "gpt-large", "--json").stdout)
    assert output["present"]["every"] == 7
    assert "the job file set 50" in output["present"]["said"]


def test_a_job_with_auto_shows_the_chosen_interval(here: Command, book: History) -> None:
    """And its own limits bind the advice."""
    author = a_long_job(book, plan={"interval": "auto", "max_interval": 200})
    with book.session() as session:
        session.merge(author.job)
    assert json.loads(here("checkpoint", "advise", "--json").stdout)["present"]["every"] == 50
    author.write(Generation(job_id=author.job.id, number=2, at=NOW, ended_at=NOW, world_size=8, ranks={"n0": [0]}, facts={"every": 50}))
    output = json.loads(here("checkpoint", "advise", "--json").stdout)
    assert output["present"]["said"] == "chosen by `auto`"
    assert output["advised"]["steps"] == 200
    assert "the most allowed is 200" in output["advised"]["reason"]
    assert "follows this by itself" not in here("checkpoint", "advise").stdout


def test_without_faults_the_assumptions_are_shown(here: Command, book: History) -> None:
    """The published rate, a minute of downtime, a rollback each: numbers that were not measured are marked."""
    author = a_long_job(book, faults=0, saves=2)
    output = json.loads(here("checkpoint", "advise", "--json").stdout)
    assert output["rate"]["per_node_hour"] == pytest.approx(PUBLISHED)
    assert (output["case"]["recovery_s"], output["case"]["rollback"]) == (60, 1)
    assert len(output["assumed"]) == 3
    text = here("checkpoint", "advise", author.name).stdout
    for words in ("the rate of faults", "1 min 00 s of downtime", "from 2 only", "assumed, in all"):
        assert words in " ".join(text.split())
    assert output["loss"]["communication"] is None


def test_before_the_first_save_there_is_nothing_to_advise(here: Command, book: History) -> None:
    """The answer says what is missing and what to do; the figures that are known are shown."""
    author = Author(book, "fresh", NOW)
    author.job.spec |= {"nnodes": 3, "nproc_per_node": 8}
    with book.session() as session:
        session.merge(author.job)
    done = here("checkpoint", "advise", "fresh")
    assert done.returncode == 0
    output = json.loads(here("checkpoint", "advise", "fresh", "--json").stdout)
    assert (output["nodes"], output["ranks"], output["measured"]["saves"], output["measured"]["steps"]) == (3, 24, 0, 0)
    assert (output["advised"], output["case"], output["table"], output["loss"]) == (None, None, [], None)


def test_a_job_without_checkpoints_is_advised(here: Command, book: History) -> None:
    """A number for it follows from the saves of an earlier run."""
    author = a_long_job(book, plan={"interval": 0}, saves=1)
    with book.session() as session:
        session.merge(author.job)
    output = json.loads(here("checkpoint", "advise", "--json").stdout)
    assert (output["present"]["every"], output["present"]["waste"], output["advised"]["steps"] > 0) == (0, None, True)
    assert here("checkpoint", "advise").returncode == 0


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--interval", "-5"], ["--interval", "often"], ["--interval"]], ids=" ".join)
def test_an_invalid_interval_is_refused(arguments: list[str], here: Command, long: Author) -> None:
    """Status 2, the option by its name, nothing on stdout."""
    done = here("checkpoint", "advise", "gpt-large", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--interval" in done.stderr


def test_unknown_phases_and_invalid_specs_are_tolerated(here: Command, long: Author, book: History) -> None:
    """Rows of another version."""
    with book.session() as session:
        long.job.spec = {"checkpoint": {"interval": "sometimes"}, "nnodes": [3]}
        session.merge(long.job)
    one = long.incident(9, "worker-sigkill", "rank 1", seconds=99)
    long.write(Phase(job_id=long.job.id, incident_id=one.id, position=9, name="unheard of", seconds=1.0))
    done = here("checkpoint", "advise", "gpt-large", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["measured"]["fleet"]["phases"]["unheard of"] == 0.0
