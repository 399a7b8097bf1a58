"""A cadence that changes with the generation: all ranks go over to it between the same two steps, or a save would wait for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.checkpoint.save import Keeping
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Job, assert_undisturbed
from tests.runtime.test_groups_standby import parked


def saved(flow: FlowDouble) -> list[int]:
    """Return the steps whose checkpoints came to stand, in order."""
    return [one["step"] for one in flow.of("saved")]


@pytest.mark.parametrize(
    ("before", "after", "steps"), [(100, 3, [9, 12, 15, 16]), (2, 5, [2, 4, 6, 10, 15, 16]), (4, None, [4, 8, 12, 16])]
)
def test_survivors_and_a_fresh_process_save_by_what_their_generation_was_told(
    job: Job, whole: Ended, before: int, after: int | None, steps: list[int]
) -> None:
    """From the step on that all of them go on from; without a word as before."""
    flow = job(save=before, chaos=[fault(1, "backward", 7)])
    flow.until_dead(1)
    flow.every = after
    flow.regroup([1])
    flow.mended()
    assert_undisturbed(flow, whole)
    assert saved(flow) == steps


@pytest.mark.parametrize("how", ["any", "again"])
def test_a_standby_forgets_the_cadence_that_it_was_started_with(job: Job, whole: Ended, how: str) -> None:
    """It parked while the job saved every hundred steps, and takes a rank of one that saves every third."""
    flow = job(how, "gate=8", save=100, chaos=[fault(2, "backward", 9)])
    parked(flow)
    flow.pass_gate()
    flow.until_dead(2)
    flow.every = 3
    flow.regroup([2], {2: "s0"})
    flow.mended()
    assert_undisturbed(flow, whole)
    assert saved(flow) == [9, 12, 15, 16]


@pytest.mark.parametrize(("before", "after", "steps"), [(7, 100, [16]), (100, 7, [14, 16])])
@pytest.mark.parametrize(("rank", "at"), [(1, "applied"), (0, "answer-1"), (0, "answer-2")])
def test_a_step_that_some_had_applied_before_the_fault_is_no_cause_to_disagree(  # noqa: PLR0917 (two fixtures, two tables)
    job: Job, whole: Ended, rank: int, at: str, before: int, after: int, steps: list[int]
) -> None:
    """It is due by one of the two cadences; who has applied it and who rolls forward to it both judge it by the old one."""
    flow = job(save=before, chaos=[fault(rank, at, 7)])
    flow.until_dead(rank)
    flow.every = after
    flow.regroup([rank])
    assert {one["step"] for one in flow.mended()} == {7}
    assert_undisturbed(flow, whole)
    assert saved(flow) == steps


def test_ranks_that_miss_a_generation_agree_in_the_next(job: Job, whole: Ended) -> None:
    """The one that was told 2 comes to nothing: nobody saves by it."""
    flow = job(save=100, chaos=[fault(2, "backward", 7), fault(2, "loading", generation=2)])
    flow.until_dead(2)
    flow.every = 2
    flow.regroup([2])
    flow.until_dead(2)
    flow.every = 7
    flow.regroup([2])
    flow.mended()
    assert_undisturbed(flow, whole)
    assert saved(flow) == [7, 14, 16]


def test_a_planned_move_brings_its_cadence_to_who_stays_and_who_comes(job: Job, whole: Ended) -> None:
    """At the step that all change over at."""
    flow = job("any", "gate-4", "gate-6", save=100)
    parked(flow)
    flow.every = 5
    flow.prepare(2, "s0")
    flow.pass_gate("gate-4")
    flow.prepared()
    for rank in range(flow.ranks):
        flow.hear("beat", rank, step=5)  # else a busy machine may have them change over before it
    flow.may_switch()
    flow.pass_gate("gate-6")
    flow.switched()
    assert_undisturbed(flow, whole)
    assert saved(flow) == [10, 15, 16]


def test_a_cadence_that_changes_while_ranks_run_changes_with_a_save(job: Job, whole: Ended) -> None:
    """Rank 0 hears it with its leave to commit, and the others in the very collective that tells them that the checkpoint stands."""
    flow = job(save=4)
    flow.pace = 3
    assert_undisturbed(flow, whole)
    assert saved(flow) == [4, 6, 9, 12, 15, 16]


@pytest.mark.parametrize(("rank", "at"), [(0, "saving"), (3, "saving"), (0, "tell-1"), (0, "tell-2"), (0, "tell-3")])
@pytest.mark.parametrize("after", [4, 7])
def test_a_rank_lost_in_the_save_that_changes_the_cadence_leaves_no_two_minds(
    job: Job, whole: Ended, rank: int, at: str, after: int
) -> None:
    """Who has heard of it already and who has not both go by what the next generation says."""
    flow = job(save=5, chaos=[fault(rank, at, 5)])
    flow.pace = 2
    flow.until_dead(rank)
    flow.every, flow.pace = after, None
    flow.regroup([rank])
    assert {one["step"] for one in flow.mended()} == {5}
    assert_undisturbed(flow, whole)
    assert [step for step in saved(flow) if step > 5] == sorted({*range(after, 17, after), 16} - {*range(6)})


def test_a_script_that_says_how_often_it_saves_is_left_to_itself() -> None:
    """What the flow chooses is a default like the one in the environment."""
    keeping = Keeping(directory=Path("/c"), every=5, keep=2)
    assert keeping.following(7) == Keeping(directory=Path("/c"), every=7, keep=2)
    assert keeping.following(None) is keeping
    own = Keeping(directory=Path("/c"), every=5, keep=2, fixed=True)
    assert own.following(7) is own
