"""Faults of ranks whose groups run on a device: the same jobs and assertions over NCCL on one card, and without a card.

Where there is none, jobs whose computation waits for collectives in a queue run on the stand-in for a device (`device_stand_in.py`).
DDP and FSDP compute on the host there, and run over gloo. All sums are of two ranks, so final parameters are compared bit by bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.mentions import mentions
from tests.runtime import flow_double
from tests.runtime.chaos import fault
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Job, Workers, assert_undisturbed, undisturbed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

Reference = Callable[..., Ended]


def on(*kinds: str) -> pytest.MarkDecorator:
    """Run a test on each of *kinds* (see `RankDevice`), and on a card."""
    card = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"))
    return pytest.mark.parametrize("kind", [*kinds, card])


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """Wait longer on a card: each process makes a context there and connects over sockets, and the ranks take turns on it."""
    with pytest.MonkeyPatch.context() as patched:
        if torch.cuda.is_available():
            patched.setattr(flow_double, "SECONDS", 2 * flow_double.SECONDS)
        yield


@pytest.fixture(scope="module")
def whole(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Give what runs a job that nothing disturbs, once."""
    known: dict[tuple[object, ...], Ended] = {}

    def run(*arguments: object, script: str, ranks: int = 4) -> Ended:
        key = (script, ranks, *arguments)
        if key not in known:
            known[key] = undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), script, UNTIL, *arguments, ranks=ranks))
        return known[key]

    return run


def replace(flow: FlowDouble, rank: int) -> None:
    """Have a new process take *rank*; the others give it their state, and keep their processes."""
    survivors = {other: pid for other, pid in flow.pids.items() if other != rank}
    flow.regroup([rank])
    assert {one["source"] for one in flow.mended()} == {"live"}
    assert {other: flow.pids[other] for other in survivors} == survivors


@on("stand-in")
def test_a_killed_a_stopped_and_a_raising_rank_of_a_grid_are_replaced(job: Job, whole: Reference, kind: str) -> None:
    """Survivors wait in the driver, for ranks in groups that have lost nobody. Graphs that they try to capture before are refused."""
    faults = [fault(0, "backward", 4), fault(3, "forward", 8, do="stop"), fault(1, "backward", 12, do="raise")]
    flow = job(f"on={kind}", "item", "captures-2", script="device_groups", chaos=faults)
    flow.until_dead(0)
    replace(flow, 0)
    flow.until_stopped(3)
    replace(flow, 3)
    assert flow.receive("exception", 1)["peer_lost"] is False
    pid = flow.pids[1]
    assert flow.until(lambda: flow.workers.ended().get(pid), "the failure of rank 1") == 1  # and no abort, though operations are under way
    assert mentions(flow.logs(), "Traceback", "a mistake of the user's own")
    replace(flow, 1)
    assert_undisturbed(flow, whole(f"on={kind}", script="device_groups"))
    refused = [one["captures"] for one in flow.of("refused")]
    assert [[what.partition(" of group")[0] for what in one] for one in refused] == [
        ["`allreduce`", "a batch of messages", "`optimizer.step()`"]
    ] * 4


@on("stand-in")
def test_a_rank_of_a_grid_migrates(job: Job, whole: Reference, kind: str) -> None:
    """The new communicators connect beside the present ones, and the state moves over gloo, which the small groups do not have."""
    flow = job(f"on={kind}", "gate-6-0", script="device_groups")
    flow.hot_spare(0)
    flow.receive("parked", "s0")
    flow.receive("at the gate", 0)
    flow.prepare(2, "s0")
    flow.prepared()
    flow.may_switch()
    flow.pass_gate()
    flow.switched()
    assert_undisturbed(flow, whole(f"on={kind}", script="device_groups"))


@on("gloo")
@pytest.mark.parametrize("how", ["any", "again"])
def test_a_hot_spare_takes_the_rank_of_a_killed_one(job: Job, whole: Reference, kind: str, how: str) -> None:
    """In place, with the memory that it had released; or by its successor, where no script has run."""
    flow = job(f"on={kind}", how, "gate=8", script="copies", ranks=2, chaos=[fault(1, "backward", 9)])
    flow.receive("roles")
    flow.hot_spare(0)
    flow.receive("parked", "s0")
    hot_spare = flow.pids["s0"]
    flow.pass_gate()
    flow.until_dead(1)
    flow.regroup([1], {1: "s0"})
    flow.mended()
    assert (flow.pids[1] == hot_spare) == (how == "any")
    assert_undisturbed(flow, whole(f"on={kind}", script="copies", ranks=2))


@on("gloo")
def test_a_replaced_rank_of_images_in_channels_last_has_their_memory_layout(job: Job, whole: Reference, kind: str) -> None:
    """With the state of a fused AdamW, and of a parameter and a buffer that do not fill their memory."""
    arguments = (f"on={kind}", "fused")
    flow = job(*arguments, script="layouts", ranks=2, chaos=[fault(1, "backward", 7)])
    flow.until_dead(1)
    replace(flow, 1)
    undisturbed_run = whole(*arguments, script="layouts", ranks=2)
    assert_undisturbed(flow, undisturbed_run)
    strides = {tuple(one) for one in undisturbed_run.results[0]["strides"]}
    assert {(27, 1, 9, 3), (1, 64), (0,)} <= strides  # of the first convolution, the transposed weight, the buffer


COMPILERS = [
    pytest.param("gloo", "aot_eager"),
    pytest.param("gloo", "inductor", marks=pytest.mark.long),
    pytest.param("cuda", "inductor", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")),
]


@pytest.mark.parametrize(("kind", "compiler"), COMPILERS)
def test_a_replaced_rank_compiles_its_model_while_the_others_wait(job: Job, whole: Reference, kind: str, compiler: str) -> None:
    """What they have compiled stays valid: the groups under it are new."""
    if compiler == "inductor" and not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("needs a C compiler")
    arguments = (f"on={kind}", f"compile={compiler}")
    flow = job(*arguments, script="copies", ranks=2, chaos=[fault(1, "backward", 9)])
    flow.until_dead(1)
    replace(flow, 1)
    assert_undisturbed(flow, whole(*arguments, script="copies", ranks=2))


@on("gloo")
def test_a_killed_rank_of_fsdp_gets_its_shard_from_the_replica(job: Job, whole: Reference, kind: str) -> None:
    """Parameters and the state of the optimizer are shards, on a mesh of shards and replicas."""
    flow = job(f"on={kind}", script="sharded", chaos=[fault(2, "backward", 5), fault(1, "forward", 11)])
    for rank in (2, 1):
        flow.until_dead(rank)
        replace(flow, rank)
    assert_undisturbed(flow, whole(f"on={kind}", script="sharded"))
    results = [(flow.folder / f"result-{rank}.json").read_text() for rank in range(4)]
    assert [results[0] == results[other] for other in (1, 2, 3)] == [False, True, False]
