"""What faults cost, of lives that are made by hand."""

from __future__ import annotations

from holdfast.accounting.attribution import attribute
from holdfast.accounting.losses import UNTIL_STARTED, UNTIL_STEP, FailureCosts
from holdfast.report.cost_table import downtime_meaning, figures, sentence
from tests.accounting.timelines import generation_span, incident_span, job_timeline, us
from tests.mentions import mentions


def trained(generation: int, first: int, last: int, begin: float, every: int = 1) -> list[tuple[int, int, float, float]]:
    """Return steps of a second each, one report for *every* of them."""
    return [(generation, step, begin + step - first + 1, float(every)) for step in range(first + every - 1, last + 1, every)]


def test_steps_lost_are_counted_in_steps_however_rarely_they_are_reported() -> None:
    """Twenty steps, back to ten, and on: ten are lost, whether each is reported or one in five."""
    for every in (1, 5):
        steps = [*trained(1, 1, 20, 0.0, every), *trained(2, 11, 30, 25.0, every)]
        timeline = job_timeline(
            45.0, [generation_span(1, 0.0), generation_span(2, 24.0)], steps, back_to={2: 10}, incidents=[incident_span(1, 20.0, 25.0, 2)]
        )
        found = FailureCosts.of(timeline, attribute(timeline))
        assert (found.steps_lost, found.rollback_s, found.productive_s) == (10, 10.0, 30.0)
        assert (found.downtime_s, found.wall_s, found.until) == (5.0, 45.0, (UNTIL_STEP,))
        assert found.ettr == 30 / 45
        assert mentions(sentence(found), "5.00 s", 10, "66.7%")


def test_no_second_is_down_twice_and_none_while_the_job_is_suspended() -> None:
    """Incidents that overlap, one that is open, and one through which a person suspended the job."""
    incidents = [
        incident_span(1, 2.0, 6.0),
        incident_span(2, 4.0, 8.0),
        incident_span(3, 10.0, 20.0),
        incident_span(4, 28.0, 99.0, outcome=None),
    ]
    timeline = job_timeline(30.0, [generation_span(1, 0.0)], [(1, 1, 1.0, 1.0)], incidents=incidents, suspensions=[(us(12.0), us(17.0))])
    found = FailureCosts.of(timeline, attribute(timeline))
    assert found.downtime_s == 6.0 + 5.0 + 2.0
    assert found.wall_s == 25.0
    assert FailureCosts.of(timeline, attribute(timeline, since=us(5.0)), since=us(5.0)).downtime_s == 3.0 + 5.0 + 2.0


def test_without_steps_nothing_is_lost_that_nobody_knows_of() -> None:
    """A downtime that ends with the start of the processes says so; beside one that ends with a step, both are said."""
    timeline = job_timeline(
        30.0, [generation_span(1, 0.0)], reports_steps=False, incidents=[incident_span(1, 5.0, 7.0, until_started=True)]
    )
    found = FailureCosts.of(timeline, attribute(timeline))
    assert (found.ettr, found.steps_lost, found.until) == (None, None, (UNTIL_STARTED,))
    shown = dict(figures(found))
    assert mentions(shown["ETTR"], "not known", "no steps")
    assert shown["ETTR"] == shown["steps lost"]
    assert shown["downtime"] == f"2.00 s, {downtime_meaning(found)}"
    assert "steps" not in sentence(found).partition("(")[0]
    other = job_timeline(9.0, [generation_span(1, 0.0)], [(1, 1, 1.0, 1.0)], incidents=[incident_span(1, 2.0, 3.0)])
    alone = FailureCosts.of(other, attribute(other))
    both = FailureCosts.sum([found, alone])
    assert both.until == (UNTIL_STEP, UNTIL_STARTED)
    assert dict(figures(both))["downtime"] == f"3.00 s, {downtime_meaning(both)}"
    assert len({downtime_meaning(one) for one in (found, alone, both)}) == 3
