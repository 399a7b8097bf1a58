"""What the recorded chaos runs need of the simulator: absences of controllers, hangs of new processes, faults paced by training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chaos_run import SAVE_EVERY, TIMEOUTS
from benchmarks.havoc import KINDS
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.simulator.causes import Cause, Symptom
from holdfast.simulator.chaos_runs import calibrated, predictions, recorded
from holdfast.simulator.engine import simulate
from holdfast.simulator.fault_sources import ControllerAway, NodeFault, PacedEvent, SimulatedEvent
from holdfast.simulator.history_times import MeasuredRecovery, times_of
from holdfast.simulator.phase_times import seconds
from holdfast.simulator.results import RunResult
from holdfast.simulator.systems import SYSTEMS, LostAttempts
from holdfast.simulator.validation import CHAOS_TOLERANCE, chaos_runs
from tests.simulator.making import PROCESS, fault, scenario

STUCK = Cause(name="stuck", kind="job-hang", symptom=Symptom.NO_FIRST_STEP, of_process=True, names_rank=True)
SYSTEM = SYSTEMS["holdfast-groups"]


def run(*events: SimulatedEvent | PacedEvent) -> RunResult:
    """Return what managed groups make of *events* on ranks of eight nodes."""
    return simulate(scenario(), SYSTEM, 0, events=list(events))


def test_nothing_is_answered_while_there_is_no_controller_and_nobody_finishes_a_recovery() -> None:
    """A fault waits for the next controller; a recovery that lost its own one is done again, by a restart of all ranks."""
    alone = run(fault(100.0, cause=PROCESS)).jobs["training"]
    assert alone.actions == {"replace-ranks": 1}
    waited = run(ControllerAway(90.0, 60.0), fault(100.0, cause=PROCESS)).jobs["training"]
    assert waited.actions == {"replace-ranks": 1}
    assert waited.downtime_total == pytest.approx(50.0 + alone.downtime_total, abs=0.2)
    cut = run(fault(100.0, cause=PROCESS), ControllerAway(101.0, 60.0)).jobs["training"]
    assert cut.actions == {"replace-ranks": 1, "restart-workers": 1}
    assert cut.downtime_total > 60.0
    assert run(ControllerAway(100.0, 60.0)).jobs["training"].incidents == 0
    load = seconds(10.0, "test")
    plan = replace(SYSTEM.plans[RecoveryAction.REPLACE_RANKS], phases=(("reschedule", load), ("load", load)))
    split = replace(SYSTEM, plans={**SYSTEM.plans, RecoveryAction.REPLACE_RANKS: plan})
    late = simulate(scenario(), split, 0, events=[fault(100.0, cause=PROCESS), ControllerAway(115.0, 60.0)]).jobs["training"]
    assert late.actions == {"replace-ranks": 1}, "the commands were given"
    assert late.downtime_total == pytest.approx(20.0, abs=0.2)


def test_a_new_process_that_hangs_is_noticed_by_the_timeout_of_its_recovery_alone() -> None:
    """Twenty minutes here; then the policy does something else."""
    job = run(fault(100.0, cause=PROCESS), NodeFault(100.001, 0, STUCK, 0.0, rank=0)).jobs["training"]
    assert job.actions == {"replace-ranks": 1, "restart-workers": 1}
    assert job.timed_out == {"replace-ranks": 1}
    assert job.incidents == 1
    assert job.downtime_total > 1200.0


def test_measured_lags_of_snapshots_and_failed_attempts_replace_what_is_computed() -> None:
    """A restart goes back twelve steps as measured, not to the newest step; a replacement that failed elsewhere fails here, too."""
    state = replace(SYSTEMS["holdfast-state"], snapshot_lags=(12,))
    behind = simulate(scenario(), state, 0, events=[fault(1005.0, cause=PROCESS)]).jobs["training"]
    assert behind.actions == {"restart-workers": 1}
    assert behind.steps_lost == 12
    costs = {}
    for escalated in (False, True):
        lost = replace(SYSTEM, lost_attempts={PROCESS.name: (LostAttempts(40.0, escalated),)})
        job = simulate(scenario(), lost, 0, events=[fault(1005.0, cause=PROCESS)]).jobs["training"]
        costs[escalated] = job.actions
        assert job.downtime_total > 40.0
    assert costs == {False: {"replace-ranks": 1}, True: {"restart-workers": 1}}


def test_a_paced_event_comes_after_training_and_finds_its_rank_where_that_is_by_then() -> None:
    """Node 0 is lost first: rank 0 goes to a spare, and the second fault follows it there; both are incidents of the job."""
    second = PacedEvent(fault(0.0, cause=PROCESS), uptime=200.0)
    moved = replace(second, event=NodeFault(0.0, 0, PROCESS, 0.0, rank=0))
    lost = fault(100.0)
    assert run(lost, second).jobs["training"].incidents == 1
    assert run(lost, moved).jobs["training"].incidents == 2
    during = PacedEvent(moved.event, uptime=None, after=0.001)
    assert run(lost, during).jobs["training"].incidents == 1
    assert run(NodeFault(50.0, 0, PROCESS, 60.0, spare=True)).jobs["training"].incidents == 0


def test_times_of_a_history_are_by_kind_and_by_single_decisions_where_there_are_enough() -> None:
    """Of three restarts that needed two decisions each, the last attempt counts; a hang is noticed as late as hangs were."""
    single = [MeasuredRecovery(kind="worker-sigkill", action="replace-ranks", decisions=1, phases={"detect": 0.02, "load": 1.0})] * 3
    odd = MeasuredRecovery(kind="worker-sigkill", action="replace-ranks", decisions=2, phases={"load": 9.0, "failed attempt": 7.0})
    twice = [
        MeasuredRecovery(kind="job-hang", action="restart-workers", decisions=2, phases={"detect": 4.0, "load": 2.0, "failed attempt": 7.0})
    ] * 3
    system = times_of([*single, odd, *twice]).applied_to(SYSTEM)
    for action, measured in ((RecoveryAction.REPLACE_RANKS, 1.0), (RecoveryAction.RESTART_WORKERS, 2.0)):
        assert dict(system.plans[action].phases)["load"].measured == (measured,) * 3
    hang = Cause(name="", kind="job-hang", symptom=Symptom.HANG)
    crash = Cause(name="", kind="worker-sigkill")
    assert system.detection(hang).mean(1.0) == pytest.approx(4.0)
    assert system.detection(crash).mean(1.0) == pytest.approx(0.02)
    assert system.detection(replace(hang, kind="collective-stuck")).mean(1.0) == pytest.approx(4.0), "a hang like others"
    assert system.failed_attempt.mean(1.0) == pytest.approx(7.0)
    assert system.plans[RecoveryAction.ROLLBACK] == SYSTEM.plans[RecoveryAction.ROLLBACK]
    assert times_of(single).applied_to(SYSTEMS["torchrun"]) is SYSTEMS["torchrun"]
    quick = replace(SYSTEM, failed_attempt=seconds(5.0, "test"))
    broken_off = [fault(100.0, cause=PROCESS), fault(105.0, node=1, cause=PROCESS)]
    costs = [simulate(scenario(), one, 0, events=broken_off).jobs["training"].downtime_total for one in (SYSTEM, quick)]
    assert costs[1] == pytest.approx(costs[0] + 5.0, abs=0.2)


def test_the_recorded_runs_are_those_of_the_benchmark_and_are_predicted_from_one_another() -> None:
    """Without its own recoveries: what a run cost makes no difference to its prediction, but does to that of others."""
    record = recorded()
    assert (record["timeouts"], record["checkpoint_steps"]) == (TIMEOUTS["recovery"], SAVE_EVERY)
    assert {fault["kind"] for run in record["runs"] for fault in run["fault_list"]} <= KINDS.keys()
    some = {**record, "runs": record["runs"][:4]}
    before = list(predictions(some, draws=2))
    changed = {**some["runs"][0]}
    changed["incident_list"] = [
        {**one, "phases": {name: 10 * value for name, value in one["phases"].items()}} for one in changed["incident_list"]
    ]
    after = list(predictions({**some, "runs": [changed, *some["runs"][1:]]}, draws=2))
    assert after[0].predicted_downtimes == before[0].predicted_downtimes
    assert after[1].predicted_downtimes != before[1].predicted_downtimes
    assert calibrated(some["runs"]).recoveries["replace-ranks"] > 10


def test_the_validation_says_how_far_off_the_predictions_are() -> None:
    """All runs together, and the median of each one's error; the goal of an error is an upper limit."""
    record = recorded()
    targets = {one.name: one for one in chaos_runs({**record, "runs": record["runs"][:3]})}
    assert list(targets) == ["chaos-downtime", "chaos-downtime-each", "chaos-steps", "chaos-steps-each"]
    whole, each = targets["chaos-downtime"], targets["chaos-downtime-each"]
    assert whole.goal == pytest.approx(sum(run["downtime_s"] for run in record["runs"][:3]))
    assert whole.values is not None
    assert whole.goal is not None
    assert whole.met == (abs(whole.values.median - whole.goal) <= CHAOS_TOLERANCE * whole.goal)
    assert each.values is not None
    assert each.met == (each.values.median <= CHAOS_TOLERANCE)
