"""The examples under faults: the loss of every step and the final state of every rank are bit-equal to an undisturbed run.

Pipeline x data, sharded and replicated models recover from kills, plain copies from faults in the middle of a recovery or a live migration.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.runtime.chaos import fault
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Job, Workers, assert_undisturbed, undisturbed

SMALL = ["--heads", "2", "--width", "16", "--context", "16", "--bytes", "50000"]
PIPELINE = ["pipeline_data", *SMALL, "--layers", "2", "--microbatches", "2", "--batch", "4"]
INTERLEAVED = ["pipeline_data", *SMALL, "--schedule", "interleaved", "--layers", "4", "--microbatches", "2", "--batch", "4"]
SHARDED = ["fsdp2", *SMALL, "--layers", "2", "--batch", "2"]
REPLICATED = [*SHARDED, "--replicate", "2"]
FIRST, LAST = [0, 1], [2, 3]
"""Ranks of a pipeline's first and last stage."""


def start_hot_spares(flow: FlowDouble, count: int = 1) -> None:
    """Start so many hot spares, once the job has reported its roles, and wait until all are offloaded."""
    roles = flow.receive("roles")["roles"]
    for number in range(count):
        flow.hot_spare(number, roles)
    for number in range(count):
        flow.receive("parked", f"s{number}")


def stepped(flow: FlowDouble, step: int) -> None:
    """Wait until every rank has committed *step*."""
    for rank in range(flow.ranks):
        flow.receive("beat", rank, step=step)


def taken_over(flow: FlowDouble, rank: int, hot_spare: str | None = None) -> tuple[set[str], set[int]]:
    """Wait for the exit of *rank* and replace it alone; return the sources of the state and its steps."""
    others = {pid for one, pid in flow.pids.items() if one not in (rank, hot_spare)}
    flow.until_dead(rank)
    flow.regroup([rank], {rank: hot_spare} if hot_spare else {})
    reports = flow.mended()
    assert not others & flow.workers.ended().keys()
    return {one["source"] for one in reports}, {one["step"] for one in reports}


@pytest.fixture
def run_undisturbed(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Return a function that runs an example undisturbed."""
    return lambda *argv, **more: undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "example", UNTIL, *argv, **more))


def assert_forgotten(flow: FlowDouble, undisturbed_run: Ended) -> None:
    """Check that the migration was dropped, that its number is unused, and that training is undisturbed."""
    assert_undisturbed(flow, undisturbed_run)
    assert flow.of("switched") == flow.of("departed") == []
    assert (flow.generation, {one["generation"] for one in flow.of("regrouped")}) == (3, {3})


def test_both_stages_lose_a_rank_and_a_third_one_migrates(job: Job, run_undisturbed: Callable[..., Ended]) -> None:
    """A hot spare replaces a rank of the first stage, a new process one of the last; then the host of the store migrates live."""
    undisturbed_run = run_undisturbed(*PIPELINE)
    faults = [fault(1, "send", 6), fault(2, "send", 9)]
    flow = job(*PIPELINE, "gate-5", "gate-11", "gate-14", script="example", chaos=faults)
    start_hot_spares(flow, 2)
    assert flow.receive("roles")["roles"] == [FIRST, LAST]
    hot_spares = flow.pids["s0"], flow.pids["s1"]
    flow.pass_gate("gate-5")
    assert taken_over(flow, 1, "s0") == ({"live"}, {5})
    assert taken_over(flow, 2) == ({"live"}, {8})
    stepped(flow, 10)
    flow.prepare(0, "s1")
    flow.pass_gate("gate-11")
    stepped(flow, 13)
    flow.prepared()
    flow.may_switch()
    flow.pass_gate("gate-14")
    assert {one["step"] for one in flow.switched()} == {14}
    assert (flow.pids[1], flow.pids[0]) == hot_spares
    assert_undisturbed(flow, undisturbed_run)
    assert len(flow.of("regrouped")) == 2 * flow.ranks


@pytest.mark.long
def test_interleaved_stages_lose_a_rank(job: Job, run_undisturbed: Callable[..., Ended]) -> None:
    """Every rank has two stages, and one dies between them: its replacement has both."""
    undisturbed_run = run_undisturbed(*INTERLEAVED)
    flow = job(*INTERLEAVED, script="example", chaos=[fault(3, "send", 8)])
    assert taken_over(flow, 3) == ({"live"}, {7})
    assert_undisturbed(flow, undisturbed_run)


@pytest.mark.long
def test_shards_without_a_copy_come_from_checkpoints(job: Job, run_undisturbed: Callable[..., Ended]) -> None:
    """Both ranks are lost in turn, before and after the backward pass: the other goes back to the checkpoint in its process.

    The hot spare that becomes rank 1 has warmed up as rank 0, in the same process: it must not load the shards of that one.
    """
    undisturbed_run = run_undisturbed(*SHARDED, ranks=2, stride=1)
    faults = [fault(1, "reduce_scatter_single", 6), fault(0, "vote", 11)]
    flow = job(*SHARDED, "gate-5", script="example", ranks=2, stride=1, save=4, chaos=faults)
    start_hot_spares(flow)
    flow.pass_gate("gate-5")
    assert taken_over(flow, 1, "s0") == ({"checkpoint"}, {4})
    assert taken_over(flow, 0) == ({"checkpoint"}, {8})
    assert_undisturbed(flow, undisturbed_run)


@pytest.mark.long
def test_a_replicated_shard_comes_from_its_living_copy(job: Job, run_undisturbed: Callable[..., Ended]) -> None:
    """Two shards on two ranks each, and no checkpoint anywhere; a hot spare that knows another shard takes over."""
    undisturbed_run = run_undisturbed(*REPLICATED)
    flow = job(*REPLICATED, "gate-5", script="example", chaos=[fault(3, "reduce_scatter_single", 8)])
    start_hot_spares(flow)
    flow.pass_gate("gate-5")
    assert taken_over(flow, 3, "s0") == ({"live"}, {7})
    assert_undisturbed(flow, undisturbed_run)
    assert not list((flow.folder / "checkpoints").glob("step-*"))


def test_a_survivor_is_lost_while_groups_are_rebuilt(job: Job, undisturbed_run: Ended) -> None:
    """The others, the host of the store among them, wait in a group that is never complete: the next generation releases them."""
    flow = job(chaos=[fault(1, "backward", 7), fault(2, "rebuilding", 7)])
    flow.until_dead(1)
    flow.regroup([1])
    flow.until_dead(2)
    assert flow.of("regrouped") == []
    flow.regroup([2])
    assert {(one["source"], one["step"]) for one in flow.mended()} == {("live", 6)}
    assert_undisturbed(flow, undisturbed_run)


def test_a_rank_that_stays_is_lost_while_the_migration_is_prepared(job: Job, undisturbed_run: Ended) -> None:
    """No rank in a group with it gets ready: all leave the half-built groups and continue with a new rank 1."""
    flow = job("any", "gate-8", "gate-14", chaos=[fault(1, "preparing")])
    start_hot_spares(flow)
    flow.prepare(2, "s0")
    flow.pass_gate("gate-8")
    flow.until_dead(1)
    assert {one["pid"] for one in flow.of("prepared")} <= {flow.pids[2]}
    flow.forget()
    flow.regroup([1])
    flow.pass_gate("gate-14")
    assert {one["source"] for one in flow.mended()} == {"live"}
    assert_forgotten(flow, undisturbed_run)


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "preparing"])
def test_the_new_process_is_lost_before_the_switch(job: Job, undisturbed_run: Ended, ready: bool) -> None:  # noqa: FBT001 (a case of the table)
    """Training continues in its groups, without a rendezvous; the next migration, to another hot spare, succeeds."""
    flow = job("any", "gate-8", "gate-11", "gate-14", chaos=[] if ready else [fault(2, "coming", generation=2)])
    start_hot_spares(flow, 2)
    flow.prepare(2, "s0")
    if ready:
        flow.prepared()
        flow.kill("s0")
    flow.until_dead("s0")
    assert bool(flow.of("prepared", "s0")) is ready
    flow.forget()
    flow.pass_gate("gate-8")
    stepped(flow, 10)
    flow.prepare(2, "s1")
    flow.pass_gate("gate-11")
    flow.prepared()
    stepped(flow, 13)
    flow.may_switch()
    flow.pass_gate("gate-14")
    assert {one["step"] for one in flow.switched()} == {14}
    assert flow.generation == 3
    assert flow.of("regrouped") == flow.of("broken") == []
    assert_undisturbed(flow, undisturbed_run)


def test_the_leaving_rank_is_lost_when_all_are_ready(job: Job, undisturbed_run: Ended) -> None:
    """Rank 0, which hosts the store of the current generation but not of the next one: a new process replaces it."""
    flow = job("any", "gate-8", "gate-14")
    start_hot_spares(flow)
    flow.prepare(0, "s0")
    flow.pass_gate("gate-8")
    flow.prepared()
    flow.kill(0)
    flow.until_dead(0)
    flow.forget()
    flow.regroup([0])
    flow.pass_gate("gate-14")
    assert {one["source"] for one in flow.mended()} == {"live"}
    assert_forgotten(flow, undisturbed_run)
