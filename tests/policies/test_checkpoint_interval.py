"""The cadence: against brute force, against exact sums, and against faults that really come at random."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.policies.checkpoint_interval import (
    PUBLISHED,
    IntervalCase,
    IntervalLimits,
    Waste,
    advise,
    daly,
    differs,
    loss,
    lost_work,
    rate_of,
    rollback_share,
    table,
    waste,
    young,
)
from tests.mentions import mentions

WIDE = IntervalLimits(least=1, most=10**9)
CASES = st.builds(
    IntervalCase,
    save_s=st.floats(0.01, 300),
    step_s=st.floats(0.01, 30),
    between_s=st.floats(60, 1e7),
    rollback=st.floats(0.05, 1),
    recovery_s=st.floats(0, 600),
)


def per_second_trained(interval: float, save_s: float, mean: float) -> float:
    """Return the time that a second of training takes on average, straight from the renewal equation."""
    return mean * math.expm1((interval + save_s) / mean) / interval


def optimum(save_s: float, mean: float) -> float:
    """Find the best interval by golden section: the function has one minimum."""
    low, high, cut = 1e-9 * mean, mean, (math.sqrt(5) - 1) / 2
    while high - low > 1e-10 * mean:
        a, b = high - cut * (high - low), low + cut * (high - low)
        low, high = (low, b) if per_second_trained(a, save_s, mean) < per_second_trained(b, save_s, mean) else (a, high)
    return (low + high) / 2


def exact_tail(most: int, mean: float) -> float:
    """Return the probability of at most *most* events where *mean* are expected."""
    return sum(math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(most + 1))


def simulated(case: IntervalCase, steps: int, saves: int, chance: Random) -> tuple[Waste, float]:
    """Train with faults until so many saves stand; return where the time went, and the work that a fault threw away on average."""
    clock = {"save": 0.0, "rollback": 0.0, "recovery": 0.0, "work": 0.0}
    work, faults = steps * case.step_s, 0
    fault = chance.expovariate(1 / case.between_s)

    def recover() -> float:
        """Recover, and anew after each fault that comes meanwhile; return the time until the next fault."""
        while (coming := chance.expovariate(1 / case.between_s)) < case.recovery_s:
            clock["recovery"] += coming
        clock["recovery"] += case.recovery_s
        return coming - case.recovery_s

    for _ in range(saves):
        left = work + case.save_s
        while fault < left:
            left -= fault
            if chance.random() < case.rollback:
                faults += 1
                clock["rollback"] += work + case.save_s - left
                left = work + case.save_s
            fault = recover()
        fault -= left
        clock["work"] += work
        clock["save"] += case.save_s
    whole = sum(clock.values())
    shares = {name: clock[name] / whole for name in ("save", "rollback", "recovery")}
    return Waste(steps=steps, **shares, reason=""), clock["rollback"] / max(1, faults)


@given(st.floats(-4, 0.3), st.floats(1, 7))
def test_dalys_interval_wastes_hardly_more_than_the_best_there_is(ratio: float, size: float) -> None:
    """From saves of a ten-thousandth of the time between faults to saves of twice that time."""
    mean = 10**size
    save = mean * 10**ratio
    best, found = optimum(save, mean), daly(save, mean)
    assert per_second_trained(found, save, mean) / per_second_trained(best, save, mean) < 1.002
    if save < mean / 10:
        assert found == pytest.approx(best, rel=5e-4)
    if save < mean / 2:
        assert found == pytest.approx(best, rel=6e-3)
    assert found == pytest.approx(best, rel=0.065)


def test_youngs_interval_is_too_long_where_saves_are_expensive() -> None:
    """As its docstring says."""
    for ratio, most in ((1 / 500, 0.022), (1 / 10, 0.17), (1, 0.69)):
        error = young(ratio * 1000, 1000) / optimum(ratio * 1000, 1000) - 1
        assert 0 < error < most
    assert young(2, 100) == pytest.approx(20)
    assert daly(1e-6, 1e6) == pytest.approx(young(1e-6, 1e6), rel=1e-6)


def test_a_save_that_takes_longer_than_two_faults_are_apart_is_answered_with_the_time_between_them() -> None:
    """Daly's rule beyond the range of his series."""
    assert daly(200, 100) == 100
    assert daly(5000, 100) == 100


@pytest.mark.parametrize("rollback", [1.0, 0.4])
@pytest.mark.parametrize(("steps", "between"), [(50, 400.0), (400, 4000.0), (100, 300.0)])
def test_the_waste_is_what_a_job_under_random_faults_loses(rollback: float, steps: int, between: float) -> None:
    """Simulated fault by fault, also those in saves and in recoveries; some 15,000 faults leave a per cent or two to chance."""
    case = IntervalCase(save_s=6.0, step_s=0.5, between_s=between, rollback=rollback, recovery_s=30.0)
    seen, again = simulated(case, steps, round(15_000 * between / (steps * case.step_s + case.save_s)), Random(7))
    said = waste(case, steps)
    assert said.save == pytest.approx(seen.save, rel=0.02)
    assert said.rollback == pytest.approx(seen.rollback, rel=0.03)
    assert said.recovery == pytest.approx(seen.recovery, rel=0.03)
    assert said.total == pytest.approx(seen.total, rel=0.02)
    assert lost_work(case, steps) == pytest.approx(again, rel=0.03)


@given(CASES)
@settings(max_examples=200)
def test_the_advice_matches_an_exhaustive_search(case: IntervalCase) -> None:
    """Brute force over the whole numbers around: none wastes noticeably less."""
    advice = advise(case, WIDE)
    tried = {max(1, round(advice.steps * factor / 200)) for factor in range(20, 800)} | {
        *range(max(1, advice.steps - 20), advice.steps + 20)
    }
    best = min((waste(case, steps) for steps in tried), key=lambda one: one.total)
    productive = 1 - waste(case, advice.steps).total
    assert productive >= (1 - best.total) * 0.997
    assert advice.seconds == pytest.approx(advice.steps * case.step_s)


@given(CASES, st.integers(1, 5000))
def test_the_shares_of_an_interval_add_up_to_at_most_all_time(case: IntervalCase, steps: int) -> None:
    """None is negative, all together are less than everything; a job that gets nowhere wastes all."""
    said = waste(case, steps)
    assert min(said.save, said.rollback, said.recovery) >= 0
    assert 0 < said.total <= 1 + 1e-9
    trained = steps * case.step_s
    if case.rollback == 1 and said.total < 1:
        whole = case.between_s * math.exp(case.recovery_s / case.between_s) * math.expm1((trained + case.save_s) / case.between_s)
        assert said.total == pytest.approx(1 - trained / whole, abs=1e-6)


def test_an_interval_that_is_never_reached_wastes_everything() -> None:
    """Without an overflow, and in words."""
    said = waste(IntervalCase(save_s=1, step_s=1, between_s=10), 10**7)
    assert said.total == 1
    assert mentions(said.reason, "never")


@given(CASES, st.integers(1, 500), st.integers(1, 500))
def test_the_advice_stays_within_its_limits_and_says_when_they_bind(case: IntervalCase, one: int, other: int) -> None:
    """The best number is named when it is not the one advised."""
    limits, free = IntervalLimits(least=min(one, other), most=max(one, other)), advise(case, WIDE)
    bound = advise(case, limits)
    assert bound.steps == min(limits.most, max(limits.least, free.steps))
    assert ("would be best" in bound.reason) == (bound.steps != free.steps)


def test_recoveries_from_living_ranks_make_saves_rarer() -> None:
    """Only faults that send the job back count for the cadence: a quarter of them, twice the interval."""
    case = IntervalCase(save_s=1, step_s=0.1, between_s=36_000)
    assert advise(replace(case, rollback=0.25), WIDE).steps == pytest.approx(2 * advise(case, WIDE).steps, rel=0.01)
    assert rollback_share(0, 0) == 1
    assert rollback_share(0, 3) == pytest.approx(1 / 8)
    assert rollback_share(3, 3) == pytest.approx(7 / 8)


def test_the_downtime_of_a_fault_does_not_move_the_best_cadence() -> None:
    """Daly: it is a factor of the whole."""
    case = IntervalCase(save_s=5, step_s=1, between_s=5000, recovery_s=0)
    assert advise(case, WIDE).steps == advise(replace(case, recovery_s=900), WIDE).steps
    assert waste(case, 200).total < waste(replace(case, recovery_s=900), 200).total


@pytest.mark.parametrize("faults", [0, 1, 2, 3, 5, 10, 40, 150])
def test_the_interval_of_a_rate_is_that_of_exact_poisson_sums(faults: int) -> None:
    """Its ends make as few, or as many, faults as were seen a matter of 5 % each, within what the approximation may err."""
    rate = rate_of(faults, 1000.0)
    assert exact_tail(faults, rate.high * 1000) == pytest.approx(0.05, rel=0.04)
    if faults:
        assert rate.low < rate.per_node_hour < rate.high
        assert 1 - exact_tail(faults - 1, rate.low * 1000) == pytest.approx(0.05, rel=0.25 if faults == 1 else 0.07)
        assert rate.per_node_hour == pytest.approx((faults + 0.5) / 1000)


def test_the_confidence_interval_of_a_rate_covers_the_true_rate() -> None:
    """Fleets with a known rate, some of them lucky: at least 90 % of the intervals hold it."""
    chance, truth, held, tries = Random(3), 0.01, 0, 2000
    for _ in range(tries):
        faults, at = 0, chance.expovariate(truth)
        while at < 400:
            faults, at = faults + 1, at + chance.expovariate(truth)
        rate = rate_of(faults, 400.0)
        held += rate.low <= truth <= rate.high
    assert held / tries >= 0.9


def test_without_a_fault_the_published_rate_applies_until_enough_time_has_passed() -> None:
    """Never a rate above what the own hours allow, never none at all."""
    assert pytest.approx(1 / 6335, rel=0.01) == PUBLISHED
    fresh = rate_of(0, 0.0)
    assert (fresh.per_node_hour, fresh.low) == (PUBLISHED, 0)
    assert mentions(fresh.reason, "assumed")
    assert fresh.high > PUBLISHED
    quiet = rate_of(0, 1e6)
    assert quiet.per_node_hour == pytest.approx(0.5e-6)
    assert quiet.high == pytest.approx(2.996e-6, rel=0.02)
    assert rate_of(1, 10.0).between_s(4) == pytest.approx(3600 * 10 / 1.5 / 4)


def test_a_fault_loses_half_an_interval_and_what_its_recovery_takes() -> None:
    """T0 counts over all faults; what was never measured is empty and part of what is assumed."""
    case = IntervalCase(save_s=2, step_s=1, between_s=1e6, rollback=0.5, recovery_s=9)
    one = loss(case, 100, {"detection": 1.0, "reschedule": 2.0, "communication": 3.0, "load": 1.5, "compilation": 1.5})
    assert one.rollback == pytest.approx(0.5 * 51, rel=1e-3)
    assert (one.reschedule, one.communication, one.load, one.compilation) == (2.0, 3.0, 1.5, 1.5)
    assert one.total == pytest.approx(9 + 25.5, rel=1e-3)
    assert "50% of the faults" in one.reason
    assert loss(case, 100, {}).communication is None


def test_no_save_is_advised_before_the_one_before_is_written() -> None:
    """Training hardly pauses for one that is written beside it; the disk sets the pace then."""
    cheap = IntervalCase(save_s=0.01, step_s=1, between_s=20_000)
    limits = IntervalLimits(least=1, most=10_000)
    assert advise(cheap, limits).steps == 20
    slow = replace(cheap, overlapped_s=100)
    assert advise(slow, limits).steps == 125
    assert mentions(advise(slow, limits).reason, "100 s")
    assert advise(replace(cheap, overlapped_s=1), limits).steps == 20


def test_the_table_shows_the_advice_shorter_and_longer_ones_and_those_asked_for() -> None:
    """In order, each once, none beyond the limits but those that a person asks about."""
    case, limits = IntervalCase(save_s=2, step_s=1, between_s=20_000), IntervalLimits(least=100, most=500)
    advice = advise(case, limits)
    rows = table(case, advice, limits, also=[7, advice.steps, 0, 9000])
    assert 200 < advice.steps < 500
    assert [row.steps for row in rows] == [7, 100, round(advice.steps / 2), advice.steps, 500, 9000]
    assert min(rows, key=lambda row: row.total).steps == advice.steps
    assert all(f"{row.steps:,} step" in row.reason for row in rows)


def test_only_a_difference_of_more_than_a_quarter_is_worth_a_change() -> None:
    """It costs less than 3 % of the waste of saves and rollbacks."""
    assert [differs(100, other) for other in (74, 75, 100, 125, 126)] == [True, False, False, False, True]
    case = IntervalCase(save_s=1, step_s=1, between_s=1e6, recovery_s=0)
    best = advise(case, WIDE).steps
    assert waste(case, round(best * 1.25)).total < 1.03 * waste(case, best).total
