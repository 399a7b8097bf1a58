"""What faults cost, of lives that are made by hand."""

from __future__ import annotations

from holdfast.accounting.attribution import settle
from holdfast.accounting.losses import UNTIL_STARTED, UNTIL_STEP, FailureCosts
from holdfast.report.loss_words import figures, sentence
from tests.accounting.lives import a_life, a_trouble, an_era, us


def trained(generation: int, first: int, last: int, begin: float, every: int = 1) -> list[tuple[int, int, float, float]]:
    """Return steps of a second each, one report for *every* of them."""
    return [(generation, step, begin + step - first + 1, float(every)) for step in range(first + every - 1, last + 1, every)]


def test_steps_lost_are_counted_in_steps_however_rarely_they_are_reported() -> None:
    """Twenty steps, back to ten, and on: ten are lost, whether each is reported or one in five."""
    for every in (1, 5):
        steps = [*trained(1, 1, 20, 0.0, every), *trained(2, 11, 30, 25.0, every)]
        life = a_life(45.0, [an_era(1, 0.0), an_era(2, 24.0)], steps, back_to={2: 10}, troubles=[a_trouble(1, 20.0, 25.0, 2)])
        found = FailureCosts.of(life, settle(life))
        assert (found.steps_lost, found.rollback_s, found.productive_s) == (10, 10.0, 30.0)
        assert (found.downtime_s, found.wall_s, found.until) == (5.0, 45.0, (UNTIL_STEP,))
        assert found.ettr == 30 / 45
        assert sentence(found) == "5.00 s of downtime, 10 steps lost, ETTR 66.7%"


def test_no_second_is_down_twice_and_none_while_the_job_is_suspended() -> None:
    """Incidents that overlap, one that is open, and one through which a person suspended the job."""
    troubles = [a_trouble(1, 2.0, 6.0), a_trouble(2, 4.0, 8.0), a_trouble(3, 10.0, 20.0), a_trouble(4, 28.0, 99.0, outcome=None)]
    life = a_life(30.0, [an_era(1, 0.0)], [(1, 1, 1.0, 1.0)], troubles=troubles, suspensions=[(us(12.0), us(17.0))])
    found = FailureCosts.of(life, settle(life))
    assert found.downtime_s == 6.0 + 5.0 + 2.0
    assert found.wall_s == 25.0
    assert FailureCosts.of(life, settle(life, since=us(5.0)), since=us(5.0)).downtime_s == 3.0 + 5.0 + 2.0


def test_without_steps_nothing_is_lost_that_nobody_knows_of() -> None:
    """A downtime that ends with the start of the processes says so; beside one that ends with a step, both are said."""
    life = a_life(30.0, [an_era(1, 0.0)], tells_steps=False, troubles=[a_trouble(1, 5.0, 7.0, until_started=True)])
    found = FailureCosts.of(life, settle(life))
    assert (found.ettr, found.steps_lost, found.until) == (None, None, (UNTIL_STARTED,))
    told = dict(figures(found))
    assert told["ETTR"] == told["steps lost"] == "not known: no steps are reported"
    assert told["downtime"] == "2.00 s, each from the fault until all processes had started: training may have begun later"
    assert "steps" not in sentence(found).partition("(")[0]
    other = a_life(9.0, [an_era(1, 0.0)], [(1, 1, 1.0, 1.0)], troubles=[a_trouble(1, 2.0, 3.0)])
    both = FailureCosts.sum([found, FailureCosts.of(other, settle(other))])
    assert both.until == (UNTIL_STEP, UNTIL_STARTED)
    assert dict(figures(both))["downtime"].endswith("or where no steps were reported until all processes had started")
