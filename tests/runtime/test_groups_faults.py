"""Faults under managed groups: survivors stay in their process, and training is bit-equal to an undisturbed run."""

from __future__ import annotations

import re

import pytest

from tests.mentions import mentions
from tests.runtime.chaos import fault
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Job, Workers, assert_undisturbed, undisturbed


def test_each_rank_in_turn_is_killed_and_no_other_restarts(job: Job, undisturbed_run: Ended) -> None:
    """Rank 0, which hosts the store, then each of the others: the replacement has the same state."""
    places = ["backward", "forward", "applied", "committed"]
    flow = job(chaos=[fault(rank, at, 4 + 3 * rank) for rank, at in enumerate(places)])
    first = dict(flow.pids)
    for rank in range(4):
        flow.until_dead(rank)
        assert {flow.pids[other] for other in range(rank + 1, 4)} == {first[other] for other in range(rank + 1, 4)}
        flow.regroup([rank])
        flow.mended()
    assert_undisturbed(flow, undisturbed_run)
    assert flow.of("exception") == []


@pytest.mark.parametrize(("lost", "at"), [([0, 3], "backward"), ([2, 3], "forward")], ids=["two", "node"])
def test_two_at_once_are_replaced_together(job: Job, undisturbed_run: Ended, lost: list[int], at: str) -> None:
    """Two ranks of different nodes, and both ranks of one node: the states of either are on surviving backup ranks."""
    flow = job(chaos=[fault(rank, at, 7) for rank in lost])
    flow.until_dead(*lost)
    flow.regroup(lost)
    assert all(one["rebuilt"] and one["source"] == "live" for one in flow.mended())
    assert_undisturbed(flow, undisturbed_run)


def test_a_rank_lost_with_all_its_backup_ranks_cannot_be_recovered_and_all_report_it(job: Job) -> None:
    """No rank has its generators and position, and there is no checkpoint: all report the reason, and none continues."""
    lost = [1, 2, 3]
    flow = job(chaos=[fault(rank, "backward", 7) for rank in lost])
    flow.until_dead(*lost)
    flow.regroup(lost)
    reasons = {flow.receive("recovery-failed", rank, generation=2)["why"] for rank in range(4)}
    assert len(reasons) == 1
    assert re.search(r"ranks? 1.* at step 6", reasons.pop())
    assert flow.of("regrouped") == []


def test_a_stopped_rank_is_killed_and_replaced(job: Job, undisturbed_run: Ended) -> None:
    """A stopped rank closes no connection: only the controller's command ends the wait of the others."""
    flow = job(chaos=[fault(2, "backward", 7, do="stop")])
    flow.until_stopped(2)
    assert flow.of("broken") == []
    flow.regroup([2])
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)


def test_cut_connections_cost_the_groups_and_no_process(job: Job, undisturbed_run: Ended) -> None:
    """All connections of one rank's groups end: all ranks regroup, and none is replaced."""
    flow = job(chaos=[fault(1, "forward", 7, do="cut")])
    first = dict(flow.pids)
    assert flow.receive("cut", 1)["connections"] > 0
    assert {flow.receive("broken", rank)["generation"] for rank in range(4)} == {1}
    flow.regroup()
    assert all(one["bytes"] == 0 and one["rebuilt"] for one in flow.mended())
    assert_undisturbed(flow, undisturbed_run)
    assert flow.pids == first


def test_an_error_of_the_script_passes_unchanged(job: Job, undisturbed_run: Ended) -> None:
    """The script's own exception ends its process as always and is reported in full; the others recover."""
    flow = job(chaos=[fault(3, "backward", 7, do="raise")])
    report = flow.receive("exception", 3)
    assert (report["type"].rpartition(".")[2], report["step"], report["peer_lost"]) == ("Mistake", 7, False)
    pid = flow.pids[3]
    assert flow.until(lambda: flow.workers.ended().get(pid), "the end of rank 3") == 1
    assert mentions((flow.folder / "rank-3.log").read_text(), "user's own")
    assert "copies.py" in report["traceback"]
    flow.regroup([3])
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)


def test_a_rank_whose_gpu_fails_in_a_recovery_exits_and_is_replaced_as_well(job: Job, undisturbed_run: Ended) -> None:
    """Rank 1 is lost, and while rank 0 sends it the state its own device fails: that is raised, not retried."""
    flow = job(chaos=[fault(1, "backward", 7), fault(0, "giving", 7, do="device")])
    flow.until_dead(1)
    flow.regroup([1])
    report = flow.receive("exception", 0)
    assert (report["type"].rpartition(".")[2], report["peer_lost"]) == ("AcceleratorError", False)
    flow.until(lambda: flow.workers.ended().get(flow.pids[0]), "the end of rank 0")
    flow.regroup([0, 1])
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)


def test_a_survivor_that_dies_in_the_rendezvous_is_replaced_as_well(job: Job, undisturbed_run: Ended) -> None:
    """Rank 2 is killed while it enters generation 2; generation 3 replaces it and rank 1, which never was in generation 2."""
    flow = job(chaos=[fault(1, "backward", 7), fault(2, "meeting", 7)])
    flow.until_dead(1)
    flow.regroup([1], fork=False)
    flow.until_dead(2)
    flow.regroup([1, 2])
    flow.mended()
    assert flow.generation == 3
    assert_undisturbed(flow, undisturbed_run)


@pytest.mark.parametrize("at", ["loading", "loaded"])
def test_a_new_process_that_dies_before_its_first_step_is_replaced_again(job: Job, undisturbed_run: Ended, at: str) -> None:
    """The new process is killed while it receives its state, and once it has it: the others hold that state as before."""
    flow = job(chaos=[fault(2, "backward", 7), fault(2, at, generation=2)])
    flow.until_dead(2)
    flow.regroup([2])
    flow.until_dead(2)
    flow.regroup([2])
    flow.mended()
    assert flow.generation == 3
    assert_undisturbed(flow, undisturbed_run)


def test_a_new_process_hosts_the_store_in_which_it_looks_for_its_own_record(job: Job, undisturbed_run: Ended) -> None:
    """Ranks 0 and 1 die, and the loss of rank 0, which hosts the store, is known later: the new process of rank 1 is to host the next."""
    flow = job(chaos=[fault(rank, "backward", 7) for rank in (0, 1)])
    flow.until_dead(0, 1)
    flow.regroup([1])
    flow.regroup([0])
    assert flow.serve == 1
    flow.mended()
    assert flow.generation == 3
    assert_undisturbed(flow, undisturbed_run)


@pytest.mark.parametrize(
    ("rank", "at", "step"),
    [(1, "vote", 6), (1, "voted", 7), (1, "applied", 7), (0, "answer-1", 7), (0, "answer-2", 7)],
)
def test_no_rank_applies_a_step_that_another_does_not(job: Job, undisturbed_run: Ended, rank: int, at: str, step: int) -> None:
    """A rank is killed before its vote, between vote and apply, after it; the root before anybody, or when one rank, has its answer."""
    flow = job(chaos=[fault(rank, at, 7)])
    flow.until_dead(rank)
    flow.regroup([rank])
    assert {one["step"] for one in flow.mended()} == {step}
    assert_undisturbed(flow, undisturbed_run)


def test_a_checkpoint_that_loses_a_peer_is_saved_later(job: Job, undisturbed_run: Ended) -> None:
    """Rank 1 is killed when all save step 10: training continues, and later checkpoints are complete."""
    flow = job(save=5, chaos=[fault(1, "saving", 10)])
    flow.until_dead(1)
    assert "step-00000010" not in {path.name for path in (flow.folder / "checkpoints").iterdir()}
    flow.regroup([1])
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)
    saved = sorted(path.name for path in (flow.folder / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{UNTIL:08}"


@pytest.fixture(scope="module")
def distinct(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return an undisturbed run of ranks that each hold a shard of their own."""
    return undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "shards", UNTIL, ranks=3))


def test_a_shard_without_a_copy_comes_from_the_checkpoint(job: Job, distinct: Ended) -> None:
    """Every rank trains another model: when one is lost, all go back to the checkpoint, survivors in their processes."""
    flow = job(script="shards", ranks=3, save=5, chaos=[fault(1, "backward", 8)])
    first = dict(flow.pids)
    flow.until_dead(1)
    flow.regroup([1])
    reports = flow.mended()
    assert {(one["source"], one["step"]) for one in reports} == {("checkpoint", 5)}
    assert_undisturbed(flow, distinct)
    assert (flow.pids[0], flow.pids[2]) == (first[0], first[2])


def test_a_script_that_checks_its_loss_survives_a_failed_attempt(job: Job) -> None:
    """It divides by a count that all ranks sum up, and exits when the loss is not finite: a lost rank must not cause that."""
    flow = job("strict", script="counted", ranks=2, stride=1, chaos=[fault(0, "forward", 9)])
    flow.pass_gate()
    flow.until_dead(0)
    flow.regroup([0])
    flow.until(lambda: flow.of("regrouped", 1) or flow.of("exception", 1), "an outcome")
    assert flow.of("exception", 1) == []


def test_a_loss_summed_up_after_the_vote_is_right_or_not_reported(job: Job, undisturbed_run: Ended) -> None:
    """Rank 2 dies after it applied step 7, before the loss is reduced: the step counts, and no rank reports a wrong loss."""
    flow = job("late", chaos=[fault(2, "applied", 7)])
    flow.until_dead(2)
    flow.regroup([2])
    flow.mended()
    ended = flow.finish()
    assert ended.status == [0] * 4
    for losses in ended.losses:
        assert {step: loss for step, loss in losses.items() if loss is not None}.items() <= undisturbed_run.losses[0].items()
    assert [result["model"] for result in ended.results] == [result["model"] for result in undisturbed_run.results]


def test_a_process_that_takes_a_rank_does_not_report_the_loss_of_another(job: Job) -> None:
    """Rank 0 dies after it applied step 7, before it reports its loss: only it knew that, and each other rank reports its own."""
    flow = job("own", ranks=2, stride=1, chaos=[fault(0, "applied", 7)])
    flow.until_dead(0)
    flow.regroup([0])
    assert {one["step"] for one in flow.mended()} == {7}
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    first, second = ended.losses
    assert [step for step, loss in first.items() if loss is None] == [7]
    assert None not in second.values()
    assert all(first[step] != second[step] for step in range(1, UNTIL + 1))


@pytest.mark.parametrize(("lost", "options"), [(0, []), (1, ["fused"])], ids=["foreach", "fused"])
def test_tensors_keep_their_memory_layout_in_a_transfer(
    workers: Workers, tmp_path_factory: pytest.TempPathFactory, job: Job, lost: int, options: list[str]
) -> None:
    """A `channels_last` network, a transposed weight, an expanded buffer, and their optimizer state: bits and strides.

    Rank 0 has running statistics of its own, which DDP copies to the others in each forward pass.
    """
    undisturbed_run = undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "layouts", UNTIL, *options, ranks=3))
    flow = job(*options, script="layouts", ranks=3, chaos=[fault(lost, "backward", 7)])
    survivors = {rank: flow.pids[rank] for rank in range(3) if rank != lost}
    flow.until_dead(lost)
    flow.regroup([lost])
    assert {one["source"] for one in flow.mended()} == {"live"}
    assert_undisturbed(flow, undisturbed_run)
    assert {rank: flow.pids[rank] for rank in survivors} == survivors
    strides = [tuple(one) for one in undisturbed_run.results[0]["strides"]]
    assert {(27, 1, 9, 3), (1, 64), (0,)} <= set(strides)  # of the first convolution, the transposed weight, the buffer
