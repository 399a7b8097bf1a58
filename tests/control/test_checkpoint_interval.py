"""How a controller chooses the checkpoint interval: from the history before it began and from its own measurements since."""

from __future__ import annotations

import time
from typing import Any

import pytest

from holdfast.control.checkpoints.interval import ENOUGH, CheckpointInterval, case_of, parts_of
from holdfast.history import models
from holdfast.history.statistics import FleetStatistics, StepStatistics
from holdfast.policies.checkpoint_interval import IntervalCase, IntervalLimits, advise, rate_of
from holdfast.spec import CheckpointPlan
from tests.mentions import mentions

AUTO = CheckpointPlan(interval="auto")
FLEET = FleetStatistics(
    jobs=3, node_hours=1000.0, faults=9, actions={"restart-workers": 9}, back=9, phases={"detect": 1.0, "load": 4.0, "rollback": 50.0}
)
WORK = StepStatistics(saves=20, save_s=2.0, steps=1000, step_s=0.5)


def an_interval(
    plan: CheckpointPlan = AUTO, fleet: FleetStatistics = FLEET, work: StepStatistics = WORK, **more: Any
) -> CheckpointInterval:
    """Return what a controller knows."""
    return CheckpointInterval(plan=plan, fleet=fleet, work=work, **more)


def an_incident(action: str, source: str | None = None) -> models.Incident:
    """Return an incident that was recovered."""
    facts = None if source is None else {"source": source}
    known: dict[str, Any] = {
        "job_id": "j",
        "number": 1,
        "kind": "k",
        "target": "s",
        "fault_at": 0.0,
        "detected_at": 0.0,
        "generation_before": 1,
    }
    return models.Incident(**known, action=action, outcome="recovered", facts=facts)


def test_an_interval_in_the_job_file_is_kept() -> None:
    """Nothing is chosen, whatever was measured."""
    assert an_interval(CheckpointPlan(interval=100)).choose(None, nodes=2, incidents=(), steps=()) is None
    assert an_interval(CheckpointPlan(interval=0)).choose(None, nodes=2, incidents=(), steps=()) is None


def test_before_enough_saves_the_interval_stays() -> None:
    """At the launch that is a hundred steps, within the limits."""
    fresh = an_interval(work=StepStatistics())
    first = fresh.choose(None, nodes=2, incidents=(), steps=())
    assert first is not None
    assert first.every == 100
    assert mentions(first.reason, 0, ENOUGH)
    for number in range(1, ENOUGH):
        fresh.note_saved(2.0, None)
        again = fresh.choose(70, nodes=2, incidents=(), steps=[0.5])
        assert again is not None
        assert (again.every, again.reason[0]) == (70, str(number))


def test_a_job_that_ran_before_starts_with_its_measurements() -> None:
    """By the policy's advice, for its number of nodes and with the faults that cause rollbacks."""
    found = an_interval().choose(None, nodes=4, incidents=(), steps=())
    rate = rate_of(9, 1000.0)
    case = IntervalCase(save_s=2.0, step_s=0.5, between_s=3600 / rate.per_node_hour / 4, rollback=9.5 / 10, recovery_s=5.0)
    assert case_of(FLEET, WORK, 4) == (case, rate)
    assert found is not None
    assert found.every == advise(case, IntervalLimits(least=10, most=10_000)).steps > 125
    assert "a save costs 2 s" in found.reason


def test_own_measurements_count_from_the_first_few_saves_on() -> None:
    """Saves that cost a hundred times as much are made a tenth as often."""
    cadence = an_interval(CheckpointPlan(interval="auto", max_interval=10**6))
    before = cadence.choose(None, nodes=4, incidents=(), steps=())
    for _ in range(ENOUGH):
        cadence.note_saved(200.0, None)
    after = cadence.choose(None, nodes=4, incidents=(), steps=[0.5])
    assert before is not None
    assert after is not None
    assert after.every == pytest.approx(10 * before.every, rel=0.1)
    slower = cadence.choose(None, nodes=4, incidents=(), steps=[5.0])
    assert slower is not None
    assert slower.every == pytest.approx(after.every / 10, rel=0.01)


def test_a_small_difference_changes_nothing_and_limits_apply() -> None:
    """An interval within a quarter of the best stays."""
    cadence = an_interval()
    best = cadence.choose(None, nodes=4, incidents=(), steps=())
    assert best is not None
    near = cadence.choose(round(best.every * 0.9), nodes=4, incidents=(), steps=())
    assert near is not None
    assert near.every == round(best.every * 0.9)
    assert "near the best" in near.reason
    bound = an_interval(CheckpointPlan(interval="auto", max_interval=150)).choose(None, nodes=4, incidents=(), steps=())
    assert bound is not None
    assert bound.every == 150
    assert mentions(bound.reason, 150)


def test_faults_since_the_start_shorten_the_interval() -> None:
    """Each incident counts once, unless the history had it already; the hours since count too."""
    cadence = an_interval(answered=frozenset({"old"}))
    same = cadence.choose(None, nodes=4, incidents={"old"}, steps=())
    more = cadence.choose(None, nodes=4, incidents={"old", *map(str, range(90))}, steps=())
    assert same is not None
    assert more is not None
    assert more.every == pytest.approx(same.every * (9.5 / 99.5) ** 0.5, rel=0.05)
    quiet = an_interval(began=time.time() - 3600 * 10_000).choose(None, nodes=4, incidents=(), steps=())
    assert quiet is not None
    assert quiet.every == pytest.approx(same.every * 41**0.5, rel=0.05)


def test_recoveries_without_a_rollback_lengthen_the_interval() -> None:
    """One that loaded a checkpoint counts like a restart."""
    cadence, other = an_interval(), an_interval()
    for _ in range(90):
        cadence.note_recovered(an_incident("replace-ranks", "live"))
        other.note_recovered(an_incident("replace-ranks", "checkpoint"))
    rare = cadence.choose(None, nodes=4, incidents=(), steps=())
    dense = other.choose(None, nodes=4, incidents=(), steps=())
    assert rare is not None
    assert dense is not None
    assert rare.every == pytest.approx(dense.every * (99.5 / 9.5) ** 0.5, rel=0.05)


def test_the_parts_of_a_recovery_are_named_by_their_phases() -> None:
    """A phase without a term counts as the detection; the rollback is left out, as it follows from the interval."""
    phases = {
        "detect": 1.0,
        "diagnose": 2.0,
        "wait": 0.5,
        "reschedule": 3.0,
        "communication": 4.0,
        "load": 5.0,
        "warm-up": 6.0,
        "rollback": 7.0,
    }
    parts = {"detection": 3.5, "reschedule": 3.0, "communication": 4.0, "load": 5.0, "compilation": 6.0}
    assert parts_of(FleetStatistics(phases=phases)) == parts
