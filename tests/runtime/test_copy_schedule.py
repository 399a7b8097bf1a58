"""When to copy: predicted windows, schedules that fit, and what is done when nothing fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.snapshots import copy_schedule
from holdfast.runtime.snapshots.copy_schedule import MARGIN, PROFILE, Profile, SnapshotLimits, plan
from holdfast.runtime.snapshots.measurements import ENOUGH, REPLAN, StepMeasurements
from holdfast.runtime.telemetry.wait_windows import WaitWindow, WaitWindows
from tests.mentions import mentions

MEGABYTE = 2**20
SPEED = 1e9
"""Bytes a second: a slice of a megabyte takes about a millisecond."""


def lived(*windows: tuple[int, float, float], step: float = 0.1, steps: int = 8, kind: str = "pipeline") -> Profile:
    """Return the profile of steps that were all alike: *windows* are numbers, begins and lengths."""
    profile = Profile()
    for _ in range(steps):
        profile.add(step, [WaitWindow(begin, begin + length, kind, number) for number, begin, length in windows])
    return profile


def test_the_longest_window_is_used_and_short_ones_are_not_disturbed() -> None:
    """A first stage has one wait in the middle of its step."""
    found = plan(lived((1, 0.0, 0.002), (3, 0.02, 0.05), (7, 0.09, 0.004)), [MEGABYTE] * 20, SPEED, SnapshotLimits())
    assert found.upto == {3: 20}
    assert (found.every, found.pause, found.overhead) == (1, 0.0, 0.0)
    assert mentions(found.reason, "1 of 3")


def test_a_last_stage_copies_at_both_ends_of_its_step() -> None:
    """It waits for the first activations and, at the end, for the vote of the others; windows that are too short are compensated."""
    found = plan(lived((1, 0.0, 0.02), (9, 0.08, 0.02)), [MEGABYTE] * 20, SPEED, SnapshotLimits())
    assert found.upto == {1: 17, 9: 20}
    assert found.gate(2) == 0


def test_a_copy_that_does_not_fit_is_taken_less_often_or_pauses_training() -> None:
    """Both are reported with their cost."""
    profile = lived((1, 0.0, 0.01))
    seldom = plan(profile, [MEGABYTE] * 40, SPEED, SnapshotLimits(overhead=0.01))
    assert seldom.upto == {1: 40}
    assert seldom.every == 34
    assert 0.009 < seldom.overhead <= 0.01
    assert mentions(seldom.reason, "41.9 ms", "10 ms", "34 steps", "1.0")
    paused = plan(profile, [MEGABYTE] * 40, SPEED, SnapshotLimits(policy="pause", pause=0.05))
    assert paused.every == 1
    assert mentions(paused.reason, "33.6 ms")
    assert plan(profile, [MEGABYTE] * 40, SPEED, SnapshotLimits(policy="pause", pause=0.02)).every == 34
    assert plan(profile, [MEGABYTE] * 40, SPEED, SnapshotLimits(), paused=0.0005).every == 1


def test_without_visible_waits_the_copy_is_spread_over_the_step() -> None:
    """As on a GPU, and in groups that are torch's own."""
    found = plan(lived(), [MEGABYTE] * 20, SPEED, SnapshotLimits())
    assert (found.every, round(found.spread, 3), dict(found.upto)) == (1, 0.08, {})
    assert plan(lived((1, 0.0, 0.05)), [MEGABYTE], SPEED, SnapshotLimits(concurrent=True)).spread > 0


def test_windows_are_predicted_as_short_as_most_of_them_were() -> None:
    """One in ten was missing, another one varies."""
    profile = Profile()
    for number in range(10):
        windows = [WaitWindow(0.0, 0.01 + 0.001 * number, "vote", 4)]
        profile.add(0.1, windows if number % 2 else [*windows, WaitWindow(0.05, 0.06, "data", 2)])
    assert [(one.number, one.kind, round(one.length, 4)) for one in profile.predicted()] == [(4, "vote", 0.011)]


WINDOWS = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 0.09), st.floats(0.0001, 0.03)), max_size=8, unique_by=lambda one: one[0])


@given(WINDOWS, st.lists(st.integers(1, MEGABYTE), min_size=1, max_size=60), st.floats(1e7, 1e10), st.sampled_from(["skip", "pause"]))
def test_a_plan_never_promises_more_than_the_windows_hold(
    windows: list[tuple[int, float, float]], sizes: list[int], speed: float, policy: str
) -> None:
    """Overlapped copying has a window; the rest is a pause, at most as often as the limits allow."""
    terms = SnapshotLimits(policy=policy)
    found = plan(lived(*windows), sizes, speed, terms)
    room = sum(length for *_, length in windows)
    assert found.copy == pytest.approx(sum(sizes) / speed)
    assert found.every >= 1
    if not found.spread:
        assert found.overlapped <= room * (1 - MARGIN) + 1e-9
        assert found.overlapped + found.pause == pytest.approx(found.copy)
        limits = [found.upto[number] for number in sorted(found.upto)]
        assert limits == sorted(limits)
    if found.pause > max(terms.pause, copy_schedule.TRIFLE):
        assert found.overhead <= terms.overhead + 1e-9 or found.every == copy_schedule.MOST_EVERY


def test_there_is_a_new_schedule_when_the_steps_have_changed() -> None:
    """Not sooner: a schedule is replaced when steps took a fifth longer, and when pauses were shorter than predicted."""
    planning = StepMeasurements(SnapshotLimits())
    planning.profile = lived((1, 0.0, 0.05))
    first = planning.plan_for([MEGABYTE] * 20)
    assert planning.plan_for([MEGABYTE] * 20) is first
    for _ in range(PROFILE):
        planning.profile.add(0.2, [WaitWindow(0.0, 0.05, "pipeline", 1)])
    plans = [planning.plan_for([MEGABYTE] * 20) for _ in range(REPLAN)]
    assert plans[0] is first
    assert plans[-1] is not first
    assert plans[-1].step > first.step


def test_measured_pauses_replace_predicted_ones() -> None:
    """According to the prediction it does not fit; no pause was measured."""
    planning = StepMeasurements(SnapshotLimits())
    planning.profile = lived((1, 0.0, 0.01))
    planning.add_copy(MEGABYTE, MEGABYTE / SPEED)
    assert planning.plan_for([MEGABYTE] * 40).every == 34
    planning.pauses.extend([0.0] * ENOUGH)
    assert [planning.plan_for([MEGABYTE] * 40).every for _ in range(REPLAN)][-1] == 1
    assert planning.wanted == 1


def test_a_new_process_copies_whenever_it_waits() -> None:
    """It has no profile of its steps yet, and the others need its snapshot."""
    planning = StepMeasurements(SnapshotLimits())
    found = planning.plan_for([MEGABYTE] * 3)
    assert [found.gate(number) for number in (1, 2, 99)] == [3, 3, 3]


def test_nested_waits_are_recorded_as_one_window() -> None:
    """The vote contains waits of its own; short ones are not recorded."""
    idle = WaitWindows()
    assert idle.enter("vote")
    assert not idle.enter("pipeline")
    while not idle.windows:
        idle.leave()
        if not idle.windows:
            idle.enter("vote")
    took, windows, _ = idle.begin_step()
    assert [one.kind for one in windows] == ["vote"]
    assert 0 <= windows[0].begin < windows[0].end <= took
    assert idle.windows == []
