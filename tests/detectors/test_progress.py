"""A job without progress: the limit is the job's own, and nobody who has a reason to be quiet is accused."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.detectors.evidence import HangLimits, Progress, RankProgress, RecoveryTimeout
from holdfast.detectors.training.progress import WINDOW, describe_pause, hang_limit, pause_in, suspect
from tests.detectors.evidence_of import a_rank, seen, the_fault
from tests.mentions import mentions

STEADY = (0.3,) * 8
DURATIONS = st.floats(min_value=0.0, max_value=1e6)
STEPS = st.lists(DURATIONS, min_size=1, max_size=2 * WINDOW).map(tuple)
LIMITS = st.builds(HangLimits, hang_min=st.floats(0.1, 100.0), hang_multiplier=st.floats(1.0, 20.0))


def status(*ages: float, steps: tuple[float, ...] = STEADY, since_start: float = 0.0) -> Progress:
    """Return the progress of ranks on a node each, of *ages*."""
    ranks = {rank: a_rank(f"n{rank}", age=age) for rank, age in enumerate(ages)}
    return Progress(at=100.0, ranks=ranks, step_seconds=steps, since_start=since_start)


@given(STEPS, LIMITS)
def test_the_limit_is_never_below_the_least(steps: tuple[float, ...], limits: HangLimits) -> None:
    """Nor below the job's own factor of its median step."""
    assert hang_limit(steps, limits) >= max(limits.hang_min, limits.hang_multiplier * median(steps[-WINDOW:]))


@given(STEPS, st.floats(1.0, 10.0), LIMITS)
def test_slower_steps_never_lower_the_limit(steps: tuple[float, ...], times: float, limits: HangLimits) -> None:
    """Each step that takes longer makes the job more patient, not less."""
    for at in range(0, len(steps), 7):
        slower = (*steps[:at], steps[at] * times, *steps[at + 1 :])
        assert hang_limit(slower, limits) >= hang_limit(steps, limits)
    assert hang_limit(tuple(step * times for step in steps), limits) >= hang_limit(steps, limits)


@given(STEPS, LIMITS, st.floats(1.0, 10.0))
def test_a_more_patient_person_never_lowers_the_limit(steps: tuple[float, ...], limits: HangLimits, times: float) -> None:
    """In either of the two settings."""
    assert hang_limit(steps, HangLimits(hang_min=limits.hang_min * times, hang_multiplier=limits.hang_multiplier)) >= hang_limit(
        steps, limits
    )
    assert hang_limit(steps, HangLimits(hang_min=limits.hang_min, hang_multiplier=limits.hang_multiplier * times)) >= hang_limit(
        steps, limits
    )


def test_the_limit_follows_the_job_and_forgets() -> None:
    """A slow step counts while it is recent, then the limit comes down again."""
    limits = HangLimits(hang_min=2.0, hang_multiplier=3.0)
    assert hang_limit((10.0,) * 8, limits) == 30.0
    assert hang_limit((1.0,) * 8 + (50.0,), limits) == 100.0
    assert hang_limit((50.0,) + (1.0,) * WINDOW, limits) == 3.0


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_duration_that_is_no_number_of_seconds_does_not_switch_the_alarm_off(odd: float) -> None:
    """A worker with a broken clock would otherwise never hang."""
    assert hang_limit((odd, 1.0, odd, 1.0), HangLimits()) == 3.0
    assert hang_limit((odd,), HangLimits()) == HangLimits().startup


@given(st.floats(0.01, 100.0), st.lists(st.floats(1.0, 2.0), min_size=2, max_size=300), st.integers(1, 4))
def test_noisy_but_healthy_steps_never_raise_an_alarm(base: float, noise: list[float], ranks: int) -> None:
    """Steps up to twice as long as the shortest, looked at when they are about to end: always the worst moment."""
    steps = [base * factor for factor in noise]
    for at in range(1, len(steps)):
        ages = [steps[at] * (1 + rank / 100) for rank in range(ranks)]
        assert seen(status(*ages, steps=tuple(steps[:at]))) == []


@given(STEPS, LIMITS, st.floats(1e-3, 100.0))
def test_an_alarm_comes_just_beyond_the_limit_and_not_at_it(steps: tuple[float, ...], limits: HangLimits, more: float) -> None:
    """Every rank has to be quiet for so long; the quote says the limit."""
    limit = hang_limit(steps, limits)
    quick = {"hang_min": limits.hang_min, "hang_multiplier": limits.hang_multiplier, "hang": 0.1}
    assert seen(status(limit, limit + more, steps=steps), **quick) == []
    fault = the_fault(status(limit * 1.001 + more, limit * 1.002 + more, steps=steps), **quick)
    assert fault.kind == "job-hang"
    assert f"(limit {limit:.1f} s)" in fault.quote


def test_one_quiet_rank_among_advancing_ones_is_no_hang() -> None:
    """It may be waiting for its turn, and when it holds the others up they soon are quiet too."""
    assert seen(status(900.0, 0.1)) == []


def test_a_hang_begins_with_the_last_sign_of_progress() -> None:
    """Detection is measured from there."""
    assert the_fault(status(901.0, 905.0)).at == 100.0 - 901.0


@given(st.floats(0.0, 5000.0), st.floats(0.0, 5000.0), st.floats(0.0, 1e5), st.booleans())
def test_a_declared_section_never_raises_before_its_own_limit(own: float, default: float, others: float, stepped: bool) -> None:  # noqa: FBT001
    """Whatever the other ranks do meanwhile, and whether or not the job has stepped."""
    steps = STEADY if stepped else ()
    for limit, section_limit in ((own, own), (default, None)):
        held = a_rank("n1", age=limit, section="evaluation", section_limit=section_limit)
        progress = Progress(at=0.0, ranks={0: a_rank(age=others), 1: held}, step_seconds=steps, since_start=others + limit)
        assert seen(progress, section=default, startup=1.0) == []


def test_a_section_beyond_its_own_limit_is_its_ranks_fault() -> None:
    """The rank that declared it is accused, not one that waits for it."""
    ranks = {0: a_rank("n0", step=3, age=800.0), 1: a_rank("n1", step=9, age=70.0, section="save", section_limit=60.0)}
    fault = the_fault(Progress(at=0.0, ranks=ranks, step_seconds=STEADY))
    assert (fault.kind, fault.rank, fault.node) == ("job-section-overrun", 1, "n1")
    assert mentions(fault.quote, "section 'save'", "70.0 s", "60.0 s")


@pytest.mark.parametrize("section", ["end of script", "evaluation", "compile", "save"])
def test_a_rank_that_evaluates_or_finishes_holds_no_alarm_against_the_others(section: str) -> None:
    """They wait for it at the next collective."""
    ranks = {0: a_rank("n0", age=600.0, section=section), 1: a_rank("n1", age=600.0)}
    assert seen(Progress(at=0.0, ranks=ranks, step_seconds=STEADY)) == []


def test_before_the_first_step_the_limit_is_that_of_the_first_step() -> None:
    """Compilation and downloads take longer than any step."""
    assert seen(status(1800.0, 1800.0, steps=(), since_start=1800.0)) == []
    fault = the_fault(status(1801.0, 1802.0, steps=(), since_start=1802.0))
    assert (fault.kind, fault.at) == ("job-never-stepped", 100.0 - 1801.0)


def test_a_long_section_before_the_first_step_is_not_held_against_it() -> None:
    """Forty minutes of declared compilation end, and the first step may still take its time."""
    assert seen(status(5.0, 5.0, steps=(), since_start=2400.0)) == []


def test_no_fault_without_data() -> None:
    """No living rank, no judgement."""
    assert seen(Progress(at=0.0, ranks={}, since_start=1e6)) == []


SUSPECTS = [
    ("stopped by a signal", {0: a_rank(step=9), 1: a_rank(step=12, process="T"), 2: a_rank(step=9)}, 1),
    ("dead and not reaped", {0: a_rank(step=9), 1: a_rank(step=9), 2: a_rank(step=12, process="Z")}, 2),
    ("stuck in the kernel", {0: a_rank(step=9), 1: a_rank(step=12, process="D"), 2: a_rank(step=9)}, 1),
    ("stopped before stuck", {0: a_rank(step=9, process="D"), 1: a_rank(step=9, process="t")}, 1),
    ("furthest behind", {0: a_rank(step=9, age=50.0), 1: a_rank(step=8, age=10.0), 2: a_rank(step=9)}, 1),
    ("longest quiet", {0: a_rank(step=9, age=10.0), 1: a_rank(step=9, age=11.0), 2: a_rank(step=9, age=9.0)}, 1),
    ("alone", {7: a_rank()}, 7),
]


@pytest.mark.parametrize(("ranks", "rank"), [pytest.param(ranks, rank, id=name) for name, ranks, rank in SUSPECTS])
def test_the_first_suspect_is_the_oddest_then_the_last_then_the_quietest(ranks: dict[int, RankProgress], rank: int) -> None:
    """Rank 0 is nothing special."""
    assert suspect(ranks) == rank


def test_a_hang_names_its_suspect_with_what_the_kernel_says() -> None:
    """The words say where to look."""
    ranks = {0: a_rank("n0", age=901.0), 1: a_rank("n1", step=39, age=901.0, process="D", wait="nfs_wait_bit_killable")}
    fault = the_fault(Progress(at=0.0, ranks=ranks, step_seconds=STEADY))
    assert (fault.node, fault.rank, fault.step) == ("n1", 1, 39)
    assert mentions(fault.quote, "rank 1 on n1", "step 39", "process state D", "nfs_wait_bit_killable")


RECORDED = {
    "an evaluation of 50 steps on all ranks": (15.0, 15.0, 15.0),
    "a checkpoint of 100 steps on all ranks": (30.0, 30.0, 30.0),
    "an evaluation of 50 steps on rank 0": (15.0, 15.0, 15.0),
}


@pytest.mark.parametrize("ages", RECORDED.values(), ids=list(RECORDED))
def test_a_pause_of_a_hundred_steps_is_reported_but_no_fault(ages: tuple[float, ...]) -> None:
    """Nobody declared it: the job is given minutes, whatever the ranks that wait say of the one that does not come."""
    for status_requested in (False, True):
        quiet = replace(status(*ages), status_requested=status_requested)
        assert seen(quiet) == []
        assert pause_in(quiet, HangLimits()) == ages[0]
        assert mentions(describe_pause(quiet, HangLimits()).text, "300 s", "timeouts.hang")
    assert pause_in(status(1.9, 1.9), HangLimits()) == 0.0


def test_a_job_that_went_on_after_a_long_pause_is_given_longer() -> None:
    """Three times the longest pause, where that is more than the limit; a shorter one changes nothing."""
    assert the_fault(replace(status(301.0), longest_pause=90.0)).kind == "job-hang"
    assert seen(replace(status(1190.0), longest_pause=400.0)) == []
    assert "(limit 1200.0 s)" in the_fault(replace(status(1201.0), longest_pause=400.0)).quote


def test_the_limit_of_a_person_who_is_in_a_hurry_counts() -> None:
    """Two seconds without a step, nothing proven."""
    assert the_fault(status(9.0, 12.0), hang=2.0).kind == "job-hang"


def test_ranks_that_outlive_others_are_given_time_since_the_last_sign_of_life() -> None:
    """An end, an output and a step are one; after that they have a reason of their own, and who prints nothing is not silent."""
    left = Progress(at=900.0, ranks={1: a_rank("n1", age=5000.0)}, steps_expected=False, ended=(0, 2), since_end=299.0, output_age=299.0)
    assert seen(left, log_silence=10.0) == []
    assert seen(replace(left, since_end=400.0), log_silence=10.0) == []
    fault = the_fault(replace(left, since_end=301.0, output_age=305.0), log_silence=10.0)
    assert (fault.kind, fault.rank, fault.at) == ("job-end-stuck", 1, 900.0 - 301.0)
    assert mentions(fault.quote, "ranks 0, 2", "status 0", "rank 1", "301.0 s", "300.0 s")
    stepping = replace(left, ranks={1: a_rank("n1", age=2.5)}, steps_expected=True, step_seconds=STEADY, since_end=400.0, output_age=400.0)
    assert seen(stepping) == []
    assert seen(replace(left, since_end=400.0, output_age=400.0), log_silence=500.0) == [], "a longer limit of a person's counts here too"


def test_a_short_limit_for_silence_does_not_hold_before_the_first_output() -> None:
    """Loading and compiling are silent; they have the limit of a start."""
    loading = replace(silent(600.0), printed=False)
    assert seen(loading, log_silence=10.0) == []
    fault = the_fault(replace(loading, output_age=1801.0), log_silence=10.0)
    assert fault.kind == "job-output-silent"
    assert mentions(fault.quote, "start", "1801.0 s")
    assert seen(loading, log_silence=10.0, startup=60.0)[0].kind == "job-output-silent"


def silent(age: float | None, process: str = "S") -> Progress:
    """Return the progress of a script without heartbeats, quiet for *age* seconds."""
    return Progress(
        at=100.0, ranks={0: a_rank("n0", step=0), 1: a_rank("n1", step=0, process=process)}, steps_expected=False, output_age=age
    )


def test_a_script_without_heartbeats_never_hangs_unless_a_limit_is_set() -> None:
    """Nothing is expected of it that nobody asked for."""
    assert seen(silent(1e9)) == []
    assert seen(silent(60.0), log_silence=60.0) == []
    assert seen(silent(None), log_silence=60.0) == []


def test_a_silent_script_blames_no_node_without_a_sign() -> None:
    """All its ranks look alike: the first of them is not the worst."""
    fault = the_fault(silent(61.0), log_silence=60.0)
    assert (fault.kind, fault.node, fault.rank, fault.at) == ("job-output-silent", None, None, 39.0)


def test_a_silent_script_blames_the_rank_that_is_stuck() -> None:
    """A process that sleeps in the kernel is a sign."""
    assert the_fault(silent(61.0, process="D"), log_silence=60.0).node == "n1"


def overrun(*reached: tuple[str, int, str], seconds: float = 121.0) -> RecoveryTimeout:
    """Return a recovery in which ranks came so far."""
    return RecoveryTimeout(at=500.0, action="replace-node", seconds=seconds, limit=120.0, reached=dict(enumerate(reached)))


def test_a_recovery_within_its_deadline_is_no_fault() -> None:
    """At the deadline is within it."""
    assert seen(overrun(("n0", 1, "has started"), seconds=120.0)) == []


OVERRUNS = [
    ("one node behind", [("n0", 3, "has loaded"), ("n0", 3, "has loaded"), ("n1", 1, "has started"), ("n1", 3, "has loaded")], "n1"),
    ("all of one node behind", [("n0", 3, "has loaded"), ("n1", 1, "has started"), ("n1", 1, "has started")], "n1"),
    ("two nodes behind", [("n0", 1, "has started"), ("n1", 1, "has started"), ("n2", 3, "has loaded")], None),
    ("all alike", [("n0", 2, "has joined"), ("n0", 2, "has joined")], None),
    ("nothing known", [], None),
]


@pytest.mark.parametrize(("reached", "node"), [pytest.param(reached, node, id=name) for name, reached, node in OVERRUNS])
def test_a_recovery_that_takes_too_long_blames_the_node_that_alone_is_behind(reached: list[tuple[str, int, str]], node: str | None) -> None:
    """Where several are behind, none is to blame."""
    fault = the_fault(overrun(*reached))
    assert (fault.kind, fault.node, fault.at) == ("recovery-overrun", node, 500.0 - 121.0)
    assert "limit 120.0 s" in fault.quote
    assert ("no worker started" in fault.quote) is (not reached)
