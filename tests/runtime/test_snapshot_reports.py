"""What a rank reports of its snapshots, from a training that really takes them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from holdfast.memstore.shared_memory import labels
from holdfast.runtime.snapshots import reports
from holdfast.runtime.snapshots.reports import SUMS, StatsReporter
from tests.mentions import mentions
from tests.runtime.trainer import FIRST, Trainer


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report costs each time, however fast the machine is."""
    monkeypatch.setattr(reports, "REPORT_SECONDS", 0.0)


def test_the_newest_snapshot_reported_is_the_newest_complete_one_in_the_memory_store(tmp_path: Path) -> None:
    """With the moment at which its state was the present one."""
    trainer, reporter = Trainer(tmp_path), StatsReporter()
    assert "step" not in reporter.stats(trainer.snapshotter, 1)
    trainer.to(FIRST + 3)
    newest = max(labels(tmp_path).values(), key=lambda label: label.step)
    said = reporter.stats(trainer.snapshotter, 1)
    assert (said["step"], said["at"]) == (newest.step, newest.time) == (FIRST + 2, newest.time)
    assert (said["every"], said["taken"]) == (1, 3)
    assert said["size"] == newest.size
    assert 0 <= said["overlapped"] <= said["copied"]


def test_statistics_of_generations_add_up_to_those_of_the_process(tmp_path: Path) -> None:
    """A process that lives on into another generation counts nothing twice."""
    trainer, reporter = Trainer(tmp_path), StatsReporter()
    reporter.stats(trainer.snapshotter, 1)
    trainer.to(FIRST + 4)
    first = reporter.stats(trainer.snapshotter, 1)
    assert reporter.stats(trainer.snapshotter, 2) | dict.fromkeys(SUMS, 0) == reporter.stats(trainer.snapshotter, 2)
    trainer.to(FIRST + 9)
    second = reporter.stats(trainer.snapshotter, 2)
    for name in SUMS:
        assert first[name] + second[name] == pytest.approx(getattr(trainer.snapshotter.counts, name))


def test_costs_are_reported_at_intervals_and_the_newest_step_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat stays small; a new generation begins with all of it."""
    monkeypatch.setattr(reports, "REPORT_SECONDS", math.inf)
    trainer, reporter = Trainer(tmp_path), StatsReporter()
    assert set(reporter.stats(trainer.snapshotter, 1)) == {"every", "size", *SUMS}
    trainer.to(FIRST + 2)
    assert set(reporter.stats(trainer.snapshotter, 1)) == {"step", "at"}
    assert set(reporter.stats(trainer.snapshotter, 2)) == {"step", "at", "every", "size", *SUMS}


def test_a_rank_that_takes_no_snapshots_reports_why() -> None:
    """Where the node or the job has none, there is nothing for a rank to say."""
    reporter = StatsReporter()
    assert reporter.stats(None, 1) == {}
    reporter.why = "no optimizer"
    assert reporter.stats(None, 1) == {"why": "no optimizer"}


def test_a_rank_whose_optimizer_is_not_called_reports_why_it_has_no_snapshots(tmp_path: Path) -> None:
    """Until it is called again; the newest complete snapshot is named besides, if there is one."""
    trainer, reporter = Trainer(tmp_path), StatsReporter()
    trainer.to(FIRST + 2, trainer.replay)
    said = reporter.stats(trainer.snapshotter, 1)
    assert ("step" in said, mentions(said["why"], "optimizer.step()")) == (False, True)
    trainer.to(FIRST + 4)
    assert reporter.stats(trainer.snapshotter, 1).keys() == {"step", "at", "every", "size", *SUMS}
