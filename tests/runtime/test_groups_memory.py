"""Snapshots in the nodes' memory and recovery from them: bit-equal, at most one step lost, wherever a rank dies."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.checkpoints.verify import fast_sum
from holdfast.memstore.reader import RemoteMemstore
from holdfast.memstore.shared_memory import PAGE, Snapshot, UnusableSnapshot
from holdfast.memstore.store_folders import key_of
from tests.agent.memory_rig import MemoryNode
from tests.mentions import mentions
from tests.runtime.chaos import fault
from tests.runtime.flow_double import TOKEN, UNTIL, Ended, FlowDouble, Job, Workers, assert_undisturbed, undisturbed
from tests.runtime.test_groups_bit_equality import INTERLEAVED, PIPELINE, SHARDED, start_hot_spares, taken_over


@pytest.fixture(scope="module")
def run_undisturbed(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Return a function that runs an example undisturbed and without snapshots, each once."""
    known: dict[str, Ended] = {}

    def run(*argv: str, **more: int) -> Ended:
        key = str((argv, more))
        if key not in known:
            known[key] = undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "example", UNTIL, *argv, **more))
        return known[key]

    return run


def flip(path: Path, at: int = PAGE) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    with path.open("r+b") as file:  # in place: processes have mapped the file
        file.seek(at)
        file.write(data[at : at + 1])


PLACES = ["opening", "opened", "copying", "copied", "sealing", "sealed", "vote", "voted"]
MORE_PLACES = {"opening", "opened", "copying", "copied", "sealed", "voted"}
"""What comes right before or after a place that is tried too."""


@pytest.mark.parametrize("place", [pytest.param(one, marks=pytest.mark.long if one in MORE_PLACES else ()) for one in PLACES])
def test_a_rank_dies_anywhere_in_a_snapshot(job: Job, run_undisturbed: Callable[..., Ended], place: str) -> None:
    """Its shard has no copy: all go back to the newest step that is complete on every rank, at most one step."""
    undisturbed_run = run_undisturbed(*SHARDED, ranks=2, stride=1)
    flow = job(*SHARDED, script="example", ranks=2, stride=1, memory=True, chaos=[fault(1, place, 10)])
    sources, steps = taken_over(flow, 1)
    assert sources == {"memory"}
    assert len(steps) == 1
    last = max(beat["step"] for beat in flow.of("beat") if beat["generation"] == 1)
    assert last - 1 <= steps.pop() <= last
    assert_undisturbed(flow, undisturbed_run)


def test_a_snapshot_with_a_flipped_bit_is_not_used(job: Job, run_undisturbed: Callable[..., Ended]) -> None:
    """The newest snapshot of the lost rank has a flipped bit: all go back to the one before, with the reason reported."""
    undisturbed_run = run_undisturbed(*SHARDED, ranks=2, stride=1)
    flow = job(*SHARDED, script="example", ranks=2, stride=1, memory=True, chaos=[fault(1, "vote", 12)])
    flow.until_dead(1)
    (older, _), (newest, path) = flow.snapshots(1)[-2:]
    flip(path)
    with Snapshot(path) as snapshot, pytest.raises(UnusableSnapshot, match="changed in memory"):
        snapshot.verify()
    flow.regroup([1])
    broken = flow.receive("broken", 1)
    assert mentions(broken["why"], "rank 1", f"step {newest}", "node-1")
    (storage_error,) = flow.of("storage-error")
    assert (storage_error["kind"], storage_error["step"]) == ("snapshot-spoiled", newest)
    flow.regroup([])
    assert {(one["source"], one["step"]) for one in flow.mended()} == {("memory", older)}
    assert_undisturbed(flow, undisturbed_run)


@pytest.mark.long
def test_all_ranks_die_at_once(job: Job, run_undisturbed: Callable[..., Ended]) -> None:
    """No rank and no checkpoint is left: new processes continue from the memory of their nodes."""
    undisturbed_run = run_undisturbed(*PIPELINE)
    flow = job(*PIPELINE, "gate-11", script="example", memory=True)
    for rank in range(flow.ranks):
        flow.receive("beat", rank, step=10)
    flow.restart()
    resumed = [flow.receive("resumed", rank, generation=2) for rank in range(flow.ranks)]
    assert {one["step"] for one in resumed} <= {9, 10}
    assert len({one["step"] for one in resumed}) == 1
    (flow.folder / "gate-11").touch()
    assert_undisturbed(flow, undisturbed_run)
    assert not list((flow.folder / "checkpoints").glob("step-*"))


@pytest.mark.long
def test_copies_of_a_stage_snapshot_half_of_it_each(job: Job, run_undisturbed: Callable[..., Ended]) -> None:
    """One node's memory has one half of both stages, the other one the rest; a restart joins them."""
    undisturbed_run = run_undisturbed(*INTERLEAVED)
    flow = job(*INTERLEAVED, "gate-9", script="example", memory=True)
    for rank in range(flow.ranks):
        flow.receive("beat", rank, step=8)
    flow.restart()
    labels = [flow.snapshots(rank)[-1][1] for rank in range(flow.ranks)]
    with Snapshot(labels[0]) as first, Snapshot(labels[1]) as second:
        assert (first.label.shard, first.label.parts, first.label.part) == (second.label.shard, 2, 0)
        assert second.label.part == 1
    flow.receive("resumed", 0, generation=2)
    (flow.folder / "gate-9").touch()
    assert_undisturbed(flow, undisturbed_run)


@pytest.mark.parametrize("place", ["restoring", pytest.param("restored", marks=pytest.mark.long)])
def test_a_survivor_dies_while_it_restores(job: Job, run_undisturbed: Callable[..., Ended], place: str) -> None:
    """Its own snapshots are still there for its replacement."""
    undisturbed_run = run_undisturbed(*SHARDED, ranks=2, stride=1)
    chaos = [fault(1, "copying", 10), fault(0, place, 10)]
    flow = job(*SHARDED, script="example", ranks=2, stride=1, memory=True, chaos=chaos)
    flow.until_dead(1)
    flow.regroup([1])
    assert taken_over(flow, 0)[0] == {"memory"}
    assert_undisturbed(flow, undisturbed_run)


@pytest.fixture
def newcomer() -> Iterator[MemoryNode]:
    """Return a node that joins the job after its ranks were started, with a server of its memory."""
    node = MemoryNode("node-2", token=TOKEN).begin()
    RemoteMemstore(node.address, TOKEN, 60.0).labels()  # a node joins when its server answers
    yield node
    node.end()


@pytest.mark.parametrize("hot_spare", [None, "s0"], ids=["fresh", "hot_spare"])
def test_a_generation_names_the_memory_servers(
    job: Job, run_undisturbed: Callable[..., Ended], newcomer: MemoryNode, hot_spare: str | None
) -> None:
    """The shard of the lost rank is on a node that joined after the start; no rank connects to the lost node."""
    undisturbed_run = run_undisturbed(*SHARDED, ranks=2, stride=1)
    with socket.create_server(("127.0.0.1", 0)) as lost_server:
        servers = {"node-1": lost_server.getsockname()}
        flow = job(
            *SHARDED, "gate-8", script="example", ranks=2, stride=1, memory=True, servers=servers, chaos=[fault(1, "vote", 10)]
        )  # fmt: skip
        if hot_spare:
            start_hot_spares(flow)
        flow.pass_gate("gate-8")
        flow.until_dead(1)
        kept = flow.snapshots(1)
        for number, (_, path) in enumerate(kept):
            shutil.copy(path, newcomer.memstore / f"copy-{key_of('node-1')}-00001.{number}.snap")
        shutil.rmtree(flow.memstore(1))
        flow.places[1], flow.servers = "node-3", {"node-2": newcomer.address}
        assert taken_over(flow, 1, hot_spare) == ({"memory"}, {kept[-1][0]})
        lost_server.setblocking(False)
        with pytest.raises(BlockingIOError):
            lost_server.accept()
    assert_undisturbed(flow, undisturbed_run)


@pytest.mark.long
def test_the_snapshot_interval_grows_where_snapshots_cost_too_much(job: Job) -> None:
    """Two ranks share a core: steps without a snapshot show its cost, all ranks agree on the interval, and report the cost."""
    flow = job(script="saturated", ranks=2, stride=2, memory=True, policy="skip")
    ended = flow.finish()
    one, other = ended.results
    assert (one["every"], one["step"]) == (other["every"], other["step"])
    assert one["every"] >= max(one["measured"], other["measured"]) >= 4
    assert max(one["share"], other["share"]) > 0.01
    assert one["slowed"] > 0
    snapshots = [beat["snapshot"] for beat in flow.of("beat", 0) if "slowed" in (beat.get("snapshot") or {})]
    assert snapshots[-1]["taken"] > 0
    for _, path in flow.snapshots(0):
        with Snapshot(path) as snapshot:
            snapshot.verify(fast_sum)
