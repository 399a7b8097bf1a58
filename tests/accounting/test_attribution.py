"""Every microsecond of a job is booked once, and where it belongs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.accounting.attribution import attribute
from holdfast.accounting.ledger import TimeCategory
from holdfast.accounting.timeline import JobTimeline
from tests.accounting.timelines import generation_span, incident_span, job_timeline, seconds, us, wall


def run_of(generation: int, first: int, last: int, begin: float, each: float = 1.0) -> list[tuple[int, int, float, float]]:
    """Return the steps from *first* to *last*, the first of them begun at *begin*, one after the other."""
    return [(generation, step, begin + (step - first + 1) * each, each) for step in range(first, last + 1)]


def test_a_job_without_a_fault_launches_trains_and_ends() -> None:
    """Two ranks, twenty seconds: nothing is left over."""
    ledger = attribute(job_timeline(20.0, [generation_span(1, 2.0)], run_of(1, 1, 10, 5.0)))
    assert seconds(ledger) == {TimeCategory.STARTUP: 10.0, TimeCategory.PRODUCTIVE: 20.0, TimeCategory.SHUTDOWN: 10.0}
    assert ledger.sum().wall == us(20.0)


def test_the_time_of_a_suspension_is_in_no_account() -> None:
    """It holds no nodes from 12 to 100, spare ones neither; the launch of the next generation counts from then on."""
    steps = [*run_of(1, 1, 5, 5.0), *run_of(2, 6, 9, 105.0)]
    timeline = job_timeline(
        110.0, [generation_span(1, 2.0), generation_span(2, 103.0)], steps, suspensions=[(us(12.0), us(100.0))], spares=[(2.0, 1)]
    )
    ledger = attribute(timeline)
    assert ledger.sum().wall == us(110.0 - 88.0)
    assert wall(ledger, TimeCategory.PRODUCTIVE) == 9.0
    assert seconds(ledger)[TimeCategory.SPARE] == 110.0 - 2.0 - 88.0


def test_an_incident_is_booked_by_phase_and_its_rollback_separately() -> None:
    """Fault at 15.5 in the eleventh step; back to step 6; the first new step is done at 20."""
    steps = [*run_of(1, 1, 10, 5.0), *run_of(2, 7, 12, 19.0)]
    phases = {"detect": 0.5, "isolate": 1.0, "reschedule": 1.5, "warm-up": 1.5}
    incident = incident_span(1, 15.5, 20.0, after=2, phases=phases)
    ledger = attribute(job_timeline(25.0, [generation_span(1, 2.0), generation_span(2, 17.0)], steps, back_to={2: 6}, incidents=[incident]))
    assert seconds(ledger) == {
        TimeCategory.STARTUP: 10.0,
        TimeCategory.PRODUCTIVE: 2 * (6 + 6),
        ("rollback", "i1"): 2 * 4.0,
        ("unfinished step", "i1"): 2 * 0.5,
        ("detect", "i1"): 1.0,
        ("isolate", "i1"): 2.0,
        ("reschedule", "i1"): 3.0,
        ("warm-up", "i1"): 1.0,  # what is left of it: the first new step itself was kept
    }


def test_the_first_step_of_a_generation_counts_as_long_as_a_usual_one() -> None:
    """What it took longer went into compiling: it is warm-up after a fault, and launch before the first one."""
    steps = [(1, 1, 8.0, 6.0), *run_of(1, 2, 5, 8.0), (2, 6, 20.0, 4.0), *run_of(2, 7, 9, 20.0)]
    incident = incident_span(1, 12.0, 20.0, after=2, phases={"detect": 2.0, "warm-up": 6.0})
    found = seconds(
        attribute(job_timeline(23.0, [generation_span(1, 1.0), generation_span(2, 14.0)], steps, back_to={2: 5}, incidents=[incident]))
    )
    assert found == {TimeCategory.STARTUP: 14.0, TimeCategory.PRODUCTIVE: 2 * 9.0, ("detect", "i1"): 4.0, ("warm-up", "i1"): 10.0}


def test_a_world_that_shrank_counts_with_the_ranks_it_had_then() -> None:
    """Four ranks before, and until the next generation stands; two after."""
    steps = [*run_of(1, 1, 4, 1.0), *run_of(2, 5, 8, 7.0)]
    incident = incident_span(1, 5.0, 8.0, after=2, phases={"detect": 1.0, "warm-up": 2.0})
    found = seconds(
        attribute(job_timeline(11.0, [generation_span(1, 0.0, 4), generation_span(2, 6.0, 2)], steps, back_to={2: 4}, incidents=[incident]))
    )
    assert found == {TimeCategory.STARTUP: 4.0, TimeCategory.PRODUCTIVE: 4 * 4 + 2 * 4, ("detect", "i1"): 4.0, ("warm-up", "i1"): 2.0}


def test_what_lies_between_steps_is_saves_as_far_as_they_were_measured() -> None:
    """The rest is the script's; more than there is between steps is not taken from them."""
    steps = [*run_of(1, 1, 2, 0.0), *run_of(1, 3, 4, 5.0), *run_of(1, 5, 6, 8.0)]
    timeline = job_timeline(10.0, [generation_span(1, 0.0)], steps, saves=[(4.0, 1, 1.5), (7.8, 1, 9.0), (7.9, 2, 9.0)])
    assert seconds(attribute(timeline)) == {TimeCategory.PRODUCTIVE: 12.0, TimeCategory.CHECKPOINTS: 8.0}
    timeline = job_timeline(10.0, [generation_span(1, 0.0)], steps, saves=[(4.0, 1, 1.5)])
    assert seconds(attribute(timeline)) == {TimeCategory.PRODUCTIVE: 12.0, TimeCategory.CHECKPOINTS: 3.0, TimeCategory.BETWEEN_STEPS: 5.0}


def test_snapshots_cost_a_share_of_the_steps_of_their_generation() -> None:
    """Of those kept: one generation's share is not another's."""
    steps = [*run_of(1, 1, 10, 0.0), *run_of(2, 11, 20, 10.0)]
    timeline = job_timeline(20.0, [generation_span(1, 0.0, snapshots=0.1), generation_span(2, 10.0)], steps, back_to={2: 10})
    assert seconds(attribute(timeline)) == {TimeCategory.PRODUCTIVE: 38.0, TimeCategory.SNAPSHOTS: 2.0}


def test_a_planned_move_is_no_loss() -> None:
    """On record a little after the ranks had made it: their steps say when it was."""
    steps = [*run_of(1, 1, 5, 0.0), *run_of(2, 6, 9, 5.5)]
    timeline = job_timeline(9.5, [generation_span(1, 0.0), generation_span(2, 6.2)], steps, back_to={2: 5})
    assert seconds(attribute(timeline)) == {TimeCategory.PRODUCTIVE: 18.0, TimeCategory.MIGRATIONS: 1.0}


def test_a_job_that_runs_has_a_step_under_way() -> None:
    """It is not lost, and not yet kept."""
    timeline = job_timeline(6.0, [generation_span(1, 0.0)], run_of(1, 1, 5, 0.0), ended=False)
    assert seconds(attribute(timeline)) == {TimeCategory.PRODUCTIVE: 10.0, TimeCategory.BETWEEN_STEPS: 2.0}


def test_a_job_that_reports_no_steps_is_known_to_have_run() -> None:
    """Launch until all ranks had started; what of the rest was kept nobody can say; the recovery's phases are known all the same."""
    incident = incident_span(1, 10.0, 14.0, after=2, phases={"detect": 1.0, "reschedule": 3.0})
    generations = [generation_span(1, 1.0, first_step_at=3.0), generation_span(2, 12.0, first_step_at=14.0)]
    timeline = job_timeline(20.0, generations, incidents=[incident], reports_steps=False)
    assert seconds(attribute(timeline)) == {
        TimeCategory.STARTUP: 6.0,
        TimeCategory.STEPS_UNKNOWN: 26.0,
        ("detect", "i1"): 2.0,
        ("reschedule", "i1"): 6.0,
    }


def test_a_job_that_never_came_to_a_generation_only_launched() -> None:
    """It held what it had asked for."""
    assert seconds(attribute(job_timeline(30.0, [], devices=8))) == {TimeCategory.STARTUP: 240.0}


def test_a_failed_job_lost_what_came_after_the_fault() -> None:
    """With no generation after, and steps that nobody went back before: they were kept, as their checkpoint may be."""
    incident = incident_span(1, 5.0, 9.0, outcome="failed", phases={"detect": 1.0, "wait": 2.0})
    found = seconds(attribute(job_timeline(9.0, [generation_span(1, 0.0)], run_of(1, 1, 4, 0.0), incidents=[incident])))
    assert found == {
        TimeCategory.PRODUCTIVE: 8.0,
        ("unfinished step", "i1"): 2.0,
        ("detect", "i1"): 2.0,
        ("wait", "i1"): 4.0,
        ("other", "i1"): 2.0,
    }


def test_an_incident_that_passed_by_itself_cuts_no_step_short() -> None:
    """Before it and after it the same step was under way."""
    steps = [*run_of(1, 1, 3, 0.0), (1, 4, 8.0, 1.0)]
    incident = incident_span(1, 5.0, 6.0, outcome="passed", phases={"detect": 1.0})
    found = seconds(attribute(job_timeline(8.0, [generation_span(1, 0.0)], steps, incidents=[incident])))
    assert found == {TimeCategory.PRODUCTIVE: 8.0, TimeCategory.BETWEEN_STEPS: 6.0, ("detect", "i1"): 2.0}


def test_steps_are_lost_to_who_first_went_back_before_them() -> None:
    """Generation 2 went back to 8, 3 to 2: of the first generation's ten steps two are the first fault's and six the second's."""
    steps = [*run_of(1, 1, 10, 0.0), *run_of(2, 9, 9, 11.0), *run_of(3, 3, 4, 13.0)]
    incidents = [incident_span(1, 10.0, 11.0, after=2), incident_span(2, 12.0, 13.0, after=3)]
    timeline = job_timeline(
        15.0,
        [generation_span(1, 0.0), generation_span(2, 10.5), generation_span(3, 12.5)],
        steps,
        back_to={2: 8, 3: 2},
        incidents=incidents,
    )
    found = seconds(attribute(timeline))
    assert found["rollback", "i1"] == 2 * 2.0
    assert found["rollback", "i2"] == 2 * (6.0 + 1.0)
    assert found[TimeCategory.PRODUCTIVE] == 2 * (2 + 2)


def test_steps_thrown_away_without_an_incident_have_no_cause() -> None:
    """A flow that reattached to the job may have started it anew."""
    steps = [*run_of(1, 1, 4, 0.0), *run_of(2, 3, 4, 6.0)]
    found = seconds(attribute(job_timeline(8.0, [generation_span(1, 0.0), generation_span(2, 5.0)], steps, back_to={2: 2})))
    assert found == {TimeCategory.PRODUCTIVE: 8.0, ("rollback", ""): 4.0, TimeCategory.MIGRATIONS: 4.0}


def test_idle_devices_are_beside_the_jobs_time() -> None:
    """Two from 1 on, none from 4 on: they cost devices, and none of the job's own time."""
    ledger = attribute(job_timeline(5.0, [generation_span(1, 0.0)], run_of(1, 1, 5, 0.0), spares=[(1.0, 2), (4.0, 0)]))
    assert seconds(ledger) == {TimeCategory.PRODUCTIVE: 10.0, TimeCategory.SPARE: 6.0}
    assert ledger.sum().wall == us(5.0)


def test_a_clock_set_back_is_booked_once() -> None:
    """Steps that are said to have ended before the one before them take no time twice, and one from the future ends by now."""
    steps = [(1, 1, 2.0, 2.0), (1, 2, 1.0, 1.0), (1, 3, 2.5, 1.0), (1, 4, 900.0, 1.0)]
    ledger = attribute(job_timeline(5.0, [generation_span(1, 0.0)], steps))
    assert ledger.sum().wall == us(5.0)
    assert wall(ledger, TimeCategory.PRODUCTIVE) == pytest.approx(1.0 + 0.5 + 1.0)


def test_only_what_came_since_is_counted() -> None:
    """In the middle of a step, and in the middle of a phase."""
    steps = [*run_of(1, 1, 4, 0.0), *run_of(2, 5, 8, 8.0)]
    incident = incident_span(1, 4.0, 9.0, after=2, phases={"detect": 1.0, "isolate": 2.0, "load": 2.0})
    timeline = job_timeline(12.0, [generation_span(1, 0.0), generation_span(2, 6.0)], steps, back_to={2: 4}, incidents=[incident])
    assert seconds(attribute(timeline, since=us(9.5))) == {TimeCategory.PRODUCTIVE: 5.0}
    assert seconds(attribute(timeline, since=us(6.0))) == {("isolate", "i1"): 2.0, ("load", "i1"): 2.0, TimeCategory.PRODUCTIVE: 8.0}
    assert seconds(attribute(timeline, since=us(13.0))) == {}


def test_a_save_that_is_recorded_before_the_begin_of_a_part_counts_on_in_it() -> None:
    """Its record and the steps are from different clocks: what does not fit before the cut is not the script's own time after it."""
    steps = [*run_of(1, 1, 1, 0.0), *run_of(1, 2, 2, 2.0)]
    timeline = job_timeline(3.0, [generation_span(1, 0.0)], steps, saves=[(1.0, 1, 1.0)])
    assert seconds(attribute(timeline)) == {TimeCategory.PRODUCTIVE: 4.0, TimeCategory.CHECKPOINTS: 2.0}
    assert seconds(attribute(timeline, since=us(1.5))) == {TimeCategory.PRODUCTIVE: 2.0, TimeCategory.CHECKPOINTS: 1.0}


@st.composite
def timelines(draw: st.DrawFn) -> JobTimeline:
    """Draw a life, however odd: overlapping incidents, steps that jump in time, generations that went back, none of them in order."""
    at = st.floats(-2.0, 40.0).map(lambda value: round(value, 4))
    short = st.floats(0.0, 5.0).map(lambda value: round(value, 4))
    numbers = range(1, draw(st.integers(0, 4)) + 1)
    begins = sorted(draw(st.lists(at, min_size=len(numbers), max_size=len(numbers))))
    generations = [
        generation_span(number, begin, draw(st.integers(1, 5)), snapshots=draw(st.floats(0, 1)), first_step_at=draw(at))
        for number, begin in zip(numbers, begins, strict=True)
    ]
    steps: dict[tuple[int, int], Any] = {}
    for number in numbers:
        for step in draw(st.lists(st.integers(1, 9), max_size=6, unique=True)):
            steps[number, step] = (number, step, draw(at), draw(short))
    incidents = []
    for number in range(1, draw(st.integers(0, 3)) + 1):
        begin, names = draw(at), st.sampled_from(["detect", "isolate", "warm-up", "strange"])
        after = draw(st.sampled_from([None, *numbers]))
        phases = draw(st.dictionaries(names, short))
        outcome = draw(st.sampled_from(["recovered", "passed", "failed", None]))
        incidents.append(incident_span(number, begin, begin + draw(short), after, phases=phases, outcome=outcome))
    return job_timeline(
        draw(st.floats(0.0, 40.0)),
        generations,
        steps.values(),
        back_to=draw(st.dictionaries(st.sampled_from(numbers), st.integers(0, 9))) if numbers else {},
        incidents=incidents,
        saves=[(draw(at), draw(st.integers(1, 4)), draw(short)) for _ in range(draw(st.integers(0, 3)))],
        spares=sorted((draw(at), draw(st.integers(0, 4))) for _ in range(draw(st.integers(0, 3)))),
        ended=draw(st.booleans()),
        reports_steps=draw(st.booleans()),
        devices=draw(st.integers(0, 5)),
    )


@settings(max_examples=40)
@given(timelines(), st.one_of(st.none(), st.floats(0.0, 50.0)))
def test_the_parts_add_up_to_the_total_whatever_happened(timeline: JobTimeline, since: float | None) -> None:
    """To the microsecond, of the job's time; and nothing is negative."""
    begin = timeline.begin if since is None else max(timeline.begin, us(since))
    ledger = attribute(timeline, since=None if since is None else us(since))
    assert ledger.sum().wall == max(0, timeline.end - begin)
    assert all(amount.wall >= 0 and amount.devices >= 0 for amount in ledger.booked.values())


@settings(max_examples=40)
@given(timelines(), st.floats(0.0, 45.0))
def test_a_later_part_is_a_part_of_the_total(timeline: JobTimeline, cut: float) -> None:
    """Use by use, phase by phase, incident by incident; snapshots are a share of what they are taken from, rounded once."""
    whole, since = attribute(timeline), attribute(timeline, since=us(cut))
    for account, amount in since.booked.items():
        slack = len(timeline.generations) if account.category in {TimeCategory.PRODUCTIVE, TimeCategory.SNAPSHOTS} else 0
        assert amount.wall <= whole.booked[account].wall + slack
        assert amount.devices <= whole.booked[account].devices + slack


@settings(max_examples=40)
@given(timelines(), st.integers(1, 7))
def test_the_devices_time_is_the_jobs_time_as_often_as_there_are_devices(timeline: JobTimeline, devices: int) -> None:
    """Where all generations have the same number: an integral that needs no accounts."""
    timeline = replace(timeline, generations=[replace(generation, devices=devices) for generation in timeline.generations], devices=devices)
    ledger = attribute(timeline)
    ends = [*(one.at for one in timeline.spares[1:]), timeline.end]
    idle = sum(max(0, min(end, timeline.end) - max(0, one.at)) * one.devices for one, end in zip(timeline.spares, ends, strict=False))
    assert ledger.sum(TimeCategory.SPARE).devices == idle
    assert ledger.sum().devices == timeline.end * devices + idle
