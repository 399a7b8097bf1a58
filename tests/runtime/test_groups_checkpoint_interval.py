"""A checkpoint interval that changes with the generation: all ranks switch to it between the same two steps, or a save would hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.checkpoint.save import CheckpointSettings
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Job, assert_undisturbed
from tests.runtime.test_groups_hot_spares import start_hot_spare


def saved(flow: FlowDouble) -> list[int]:
    """Return the steps of the complete checkpoints, in order."""
    return [one["step"] for one in flow.of("saved")]


@pytest.mark.parametrize(
    ("before", "after", "steps"), [(100, 3, [9, 12, 15, 16]), (2, 5, [2, 4, 6, 10, 15, 16]), (4, None, [4, 8, 12, 16])]
)
def test_survivors_and_a_new_process_save_at_the_interval_of_their_generation(
    job: Job, undisturbed_run: Ended, before: int, after: int | None, steps: list[int]
) -> None:
    """From the step that all continue from; without a new interval as before."""
    flow = job(save=before, chaos=[fault(1, "backward", 7)])
    flow.until_dead(1)
    flow.every = after
    flow.regroup([1])
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)
    assert saved(flow) == steps


@pytest.mark.parametrize("how", ["any", "again"])
def test_a_hot_spare_drops_the_interval_that_it_was_started_with(job: Job, undisturbed_run: Ended, how: str) -> None:
    """It was offloaded while the job saved every 100 steps, and takes a rank of a job that saves every third."""
    flow = job(how, "gate=8", save=100, chaos=[fault(2, "backward", 9)])
    start_hot_spare(flow)
    flow.pass_gate()
    flow.until_dead(2)
    flow.every = 3
    flow.regroup([2], {2: "s0"})
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)
    assert saved(flow) == [9, 12, 15, 16]


@pytest.mark.parametrize(("before", "after", "steps"), [pytest.param(7, 100, [16], marks=pytest.mark.long), (100, 7, [14, 16])])
@pytest.mark.parametrize(("rank", "at"), [(1, "applied"), (0, "answer-1"), (0, "answer-2")])
def test_ranks_agree_about_a_step_that_some_had_applied_before_the_fault(  # noqa: PLR0917 (two fixtures, two tables)
    job: Job, undisturbed_run: Ended, rank: int, at: str, before: int, after: int, steps: list[int]
) -> None:
    """It is due by one of the two intervals; ranks that applied it and ranks that roll forward to it both use the old one."""
    flow = job(save=before, chaos=[fault(rank, at, 7)])
    flow.until_dead(rank)
    flow.every = after
    flow.regroup([rank])
    assert {one["step"] for one in flow.mended()} == {7}
    assert_undisturbed(flow, undisturbed_run)
    assert saved(flow) == steps


def test_ranks_that_miss_a_generation_agree_in_the_next(job: Job, undisturbed_run: Ended) -> None:
    """The generation with interval 2 fails: no rank saves by it."""
    flow = job(save=100, chaos=[fault(2, "backward", 7), fault(2, "loading", generation=2)])
    flow.until_dead(2)
    flow.every = 2
    flow.regroup([2])
    flow.until_dead(2)
    flow.every = 7
    flow.regroup([2])
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)
    assert saved(flow) == [7, 14, 16]


def test_a_live_migration_brings_its_interval_to_old_and_new_processes(job: Job, undisturbed_run: Ended) -> None:
    """At the step at which all switch."""
    flow = job("any", "gate-4", "gate-6", save=100)
    start_hot_spare(flow)
    flow.every = 5
    flow.prepare(2, "s0")
    flow.pass_gate("gate-4")
    flow.prepared()
    for rank in range(flow.ranks):
        flow.receive("beat", rank, step=5)  # or a busy machine may have them switch before it
    flow.may_switch()
    flow.pass_gate("gate-6")
    flow.switched()
    assert_undisturbed(flow, undisturbed_run)
    assert saved(flow) == [10, 15, 16]


def test_an_interval_that_changes_while_ranks_run_changes_with_a_save(job: Job, undisturbed_run: Ended) -> None:
    """Rank 0 receives it with the permission to commit, and the others in the collective that confirms the checkpoint."""
    flow = job(save=4, interval=3)
    assert_undisturbed(flow, undisturbed_run)
    assert saved(flow) == [4, 6, 9, 12, 15, 16]


@pytest.mark.parametrize(("rank", "at"), [(0, "saving"), (3, "saving"), (0, "broadcast-1"), (0, "broadcast-2"), (0, "broadcast-3")])
@pytest.mark.parametrize("after", [pytest.param(4, marks=pytest.mark.long), 7])
def test_ranks_agree_after_a_loss_in_the_save_that_changes_the_interval(
    job: Job, undisturbed_run: Ended, rank: int, at: str, after: int
) -> None:
    """Ranks that know the new interval and ranks that do not both follow the next generation."""
    flow = job(save=5, interval=2, chaos=[fault(rank, at, 5)])
    flow.until_dead(rank)
    flow.every, flow.interval = after, None
    flow.regroup([rank])
    assert {one["step"] for one in flow.mended()} == {5}
    assert_undisturbed(flow, undisturbed_run)
    assert [step for step in saved(flow) if step > 5] == sorted({*range(after, 17, after), 16} - {*range(6)})


def test_an_interval_set_by_the_script_stays() -> None:
    """The controller's choice is a default, like the one in the environment."""
    settings = CheckpointSettings(directory=Path("/c"), every=5, keep=2)
    assert settings.with_interval(7) == CheckpointSettings(directory=Path("/c"), every=7, keep=2)
    assert settings.with_interval(None) is settings
    own = CheckpointSettings(directory=Path("/c"), every=5, keep=2, fixed=True)
    assert own.with_interval(7) is own
