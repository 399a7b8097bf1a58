"""Which ranks a fault of a GPU is about: by the process that the driver names, or by the devices that processes hold open."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.node.devices import is_idle, rank_with_gpu_of, ranks_on
from holdfast.agent.workers.worker import Worker
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.log_lines.kernel_lines import finding_of
from holdfast.detectors.log_lines.xids import UNUSABLE
from holdfast.detectors.nodes.readings import KernelLine
from holdfast.protocol import PROTOCOL, Message
from tests.agent.rig import CLIENT, Node
from tests.mentions import mentions

BUSES = ("0000:18:00.0", "0000:3b:00.0")
PART, QUOTE = "GPU 0000:3b:00.0", "GPU 0000:3b:00.0: Xid 79, GPU has fallen off the bus"
HOLD = "import sys, time; files = [open(name) for name in sys.argv[1:]]; print('open', flush=True); time.sleep(600)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Give the folders of a node with two GPUs, as its driver lists them."""
    for minor, bus in enumerate(BUSES):
        place = tmp_path / "proc/driver/nvidia/gpus" / bus
        place.mkdir(parents=True)
        (place / "information").write_text(f"Model: \t\t H100\nGPU UUID: \t GPU-{minor}aa\nDevice Minor: \t {minor}\n")
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/nvidia{minor}").touch()
    return tmp_path


@pytest.fixture
def holding(root: Path) -> Iterator[dict[tuple[int, ...], int]]:
    """Give processes by the numbers of the GPUs that they have open."""
    begun = {}
    for minors in ((), (0,), (1,), (0, 1)):
        files = [str(root / f"dev/nvidia{minor}") for minor in minors]
        begun[minors] = subprocess.Popen([sys.executable, "-c", HOLD, *files], stdout=subprocess.PIPE)
    for process in begun.values():
        assert process.stdout is not None
        process.stdout.readline()
    yield {minors: process.pid for minors, process in begun.items()}
    for process in begun.values():
        process.kill()
        process.communicate()


def a_worker(rank: int, pid: int, **variables: str) -> Worker:
    """Return a worker whose environment chooses its GPU like this."""
    return Worker(rank=rank, generation=1, log=Path("/nowhere"), pid=pid, gpu_variables=variables)


@pytest.mark.parametrize(
    ("minors", "sees", "ranks"),
    [
        pytest.param((), {"LOCAL_RANK": "1"}, [], id="a rank that computes on no GPU"),
        pytest.param((1,), {"LOCAL_RANK": "0"}, [3], id="the only GPU that it has open"),
        pytest.param((0, 1), {"LOCAL_RANK": "1"}, [3], id="the GPU of its local rank"),
        pytest.param((0, 1), {"LOCAL_RANK": "0"}, [], id="another GPU of its local rank"),
        pytest.param((0, 1), {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1,0"}, [3], id="the first that it may see"),
        pytest.param((0, 1), {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-1aa"}, [3], id="the one that it may see, by its name"),
        pytest.param((0, 1), {"LOCAL_RANK": "5"}, [], id="a GPU that is not there"),
        pytest.param((0, 1), {"LOCAL_RANK": "x"}, [], id="nonsense"),
    ],
)
def test_a_gpu_is_the_ranks_that_has_it_open_and_takes_it(
    root: Path, holding: dict[tuple[int, ...], int], minors: tuple[int, ...], sees: dict[str, str], ranks: list[int]
) -> None:
    """CUDA opens all that it may see: of several the one counts that the rank's environment names."""
    assert ranks_on(PART, QUOTE, [a_worker(3, holding[minors], **sees)], root) == ranks


def test_a_gpu_is_idle_only_if_every_rank_has_others_open(root: Path, holding: dict[tuple[int, ...], int]) -> None:
    """A rank that has opened none yet may still take it, and one that has exited may have used it."""
    first, both, none = (a_worker(number, holding[minors]) for number, minors in enumerate(((0,), (0, 1), ())))
    assert is_idle(PART, [first], root)
    assert not is_idle("GPU 0000:18:00.0", [first], root)
    assert not is_idle(PART, [first, both], root)
    assert not is_idle(PART, [first, none], root)
    assert not is_idle(PART, [], root)
    assert not is_idle("GPU 0000:99:00.0", [first], root), "the driver does not list it"
    gone = a_worker(1, holding[0,])
    gone.exited = True
    assert not is_idle(PART, [first, gone], root)


def test_a_gpu_of_another_vendor_is_idle_while_ranks_have_nvidias_open(root: Path, holding: dict[tuple[int, ...], int]) -> None:
    """A display that fails is no reason to leave; what it is has to be known, and a network card is no GPU."""
    line = "amdgpu 0000:03:00.0: amdgpu: Fatal error during GPU init"
    found = finding_of(KernelLine(sequence=1, microseconds=1, level=3, text=line))
    assert found is not None
    on_nvidia, on_nothing = a_worker(0, holding[0,]), a_worker(1, holding[()])
    assert not is_idle(found.part, [on_nvidia], root), "nothing is known of that device"
    place = root / "sys/bus/pci/devices/0000:03:00.0"
    place.mkdir(parents=True)
    for vendor, kind, idle in (("0x1002", "0x030000", True), ("0x1002", "0x120000", True), ("0x15b3", "0x020700", False)):
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "class").write_text(f"{kind}\n")
        assert is_idle(found.part, [on_nvidia], root) == idle
        assert not is_idle(found.part, [on_nvidia, on_nothing], root), "it may be what the other one uses"
    (place / "vendor").write_text("0x10de\n")
    (place / "class").write_text("0x030000\n")
    assert not is_idle(found.part, [on_nvidia], root), "one that the driver does not list any more may have been in use"


def test_the_process_that_the_driver_names_is_the_ranks_or_one_that_it_began(root: Path, holding: dict[tuple[int, ...], int]) -> None:
    """Whatever is open; of a part that is no GPU nothing is said."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"], stdin=-1
    )
    try:
        workers = [a_worker(0, holding[()]), a_worker(1, launcher.pid)]
        assert ranks_on(PART, f"{QUOTE}, pid='{holding[()]}', name=python", workers, root) == [0]
        inner = None
        while inner is None:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            inner = children[0] if children else None
        assert ranks_on(PART, f"{QUOTE}, pid={inner}, name=python", workers, root) == [1]
        assert ranks_on("disk sda", f"pid={inner}", workers, root) == []
        assert ranks_on(PART, "pid=1, name=init", workers, root) == []
    finally:
        launcher.communicate()


def test_kinds_after_which_a_gpu_does_no_work_ask_for_the_node_to_leave() -> None:
    """They are in the catalogue, speak against a GPU, and ask for a reset or an eviction."""
    assert {(CATALOGUE[kind].attributed_to, CATALOGUE[kind].recommended_action) for kind in UNUSABLE} <= {
        ("gpu", "reset-gpu"),
        ("gpu", "evict"),
    }


def test_a_hot_spare_would_share_the_gpu_of_the_rank_that_sees_the_same_ones(root: Path, holding: dict[tuple[int, ...], int]) -> None:
    """Ranks that have no GPU open share nothing, and neither do those that have another local rank, or see others."""
    first, both, none = holding[0,], holding[0, 1], holding[()]
    for pid in (first, both):
        assert rank_with_gpu_of({"LOCAL_RANK": "1", "RANK": "9"}, [a_worker(3, pid, LOCAL_RANK="1")], root) == 3
        assert rank_with_gpu_of({"LOCAL_RANK": "0"}, [a_worker(3, pid, LOCAL_RANK="1")], root) is None
        assert rank_with_gpu_of({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}, [a_worker(3, pid, LOCAL_RANK="1")], root) is None
    assert rank_with_gpu_of({"LOCAL_RANK": "1"}, [a_worker(3, none, LOCAL_RANK="1")], root) is None, "a job of the CPU"
    assert rank_with_gpu_of({"LOCAL_RANK": "1"}, [], root) is None
    other = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}
    assert rank_with_gpu_of(other, [a_worker(3, first, LOCAL_RANK="1")], root) == 3, "the same GPU, chosen in another way"
    assert rank_with_gpu_of({"LOCAL_RANK": "x"}, [a_worker(3, first, LOCAL_RANK="0")], root) is None, "nonsense"


@pytest.mark.parametrize(
    ("visible", "local_ranks"),
    [
        pytest.param("1", (0, 1), id="one GPU for all"),
        pytest.param("0,1", (0, 0), id="one local rank for both"),
        pytest.param("0,1", (0, 1, 2, 3), id="more ranks than GPUs"),
    ],
)
def test_a_hot_spare_may_share_a_gpu_where_ranks_share_one_already(
    root: Path, holding: dict[tuple[int, ...], int], visible: str, local_ranks: tuple[int, ...]
) -> None:
    """Whoever starts several ranks on one GPU means them to share it, as the benchmark on one card does."""
    pid, seen = holding[0, 1], {"CUDA_VISIBLE_DEVICES": visible}
    ranks = [a_worker(rank, pid, LOCAL_RANK=str(local), **seen) for rank, local in enumerate(local_ranks)]
    assert rank_with_gpu_of({"LOCAL_RANK": "0", **seen}, ranks, root) is None
    assert rank_with_gpu_of({"LOCAL_RANK": "0", **seen}, ranks[:1], root) == 0
    ranks[1].exited = True
    assert rank_with_gpu_of({"LOCAL_RANK": "0", **seen}, ranks[:2], root) == 0


COMPUTES = (
    CLIENT
    + """
hello()
waits = "HOLDFAST_HOT_SPARE" in os.environ
if waits:
    say(t="parked", roles=[0], role=0, seconds=0.5, rss=4096, coverage={})
    incoming.readline()
files = [open(name) for name in sys.argv[1:]]
say(t="resumed", step=0, path=None, **({"generation": 2} if waits else {}))
incoming.read()
"""
)
"""A rank that has the GPUs in its arguments open; as a hot spare it opens them when it gets a rank."""


@pytest.mark.parametrize("visible", [None, "0,1", "1,0"])
def test_an_agent_starts_no_hot_spare_on_the_gpu_of_a_rank(
    new_node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """However the agent's own environment shows the GPUs: the command names only the local rank. A hot spare becomes a rank like others."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shown: dict[str, Any] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    new_node.begin("--root", str(root), **shown)
    gpus = [str(root / f"dev/nvidia{minor}") for minor in (0, 1)]

    def place(rank: int, local_rank: int, **more: str) -> dict[str, str]:
        return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "HOLDFAST_GENERATION": "1", **more}

    with new_node.flow().attach(0) as flow:

        def start(*spares: tuple[int, int]) -> Message:
            given = [{"id": number, "environment": place(0, local, HOLDFAST_HOT_SPARE=str(number))} for number, local in spares]
            return flow.ok("start-hot-spares", hot_spares=given)

        flow.prepare(new_node, [new_node.script(COMPUTES), *gpus], warm=True)
        flow.ok("start", generation=1, membership={"node": [5]}, workers=[{"rank": 5, "environment": place(5, 1)}])
        flow.wait("resumed", rank=5)
        answer = start((0, 0), (1, 1))
        assert answer["started"] == [0]
        assert mentions(answer["refused"].pop("1"), "share the GPU of rank 5")
        assert not answer["refused"]
        flow.wait("hot-spare.ready", id=0)
        seat = {"rank": 5, "from": "hot-spare", "hot_spare": 0, "environment": place(5, 1)}  # at the place of the rank before
        flow.ok("regroup", generation=2, membership={"node": [5]}, facts={"since": 1}, workers=[seat], leave=0.0)
        flow.wait("worker.exited", rank=5, generation=1)
        flow.wait("resumed", rank=5, generation=2)
        assert start((2, 1), (3, 0))["started"] == [3]


WAITS_ON_GPU = (
    CLIENT
    + """
hello()
waits = "HOLDFAST_HOT_SPARE" in os.environ
files = [open(name) for name in sys.argv[1:]]
if waits:
    say(t="parked", roles=[0], role=0, seconds=0.5, rss=4096, coverage={})
else:
    say(t="resumed", step=0, path=None)
incoming.read()
"""
)
"""A rank, or a hot spare that has warmed up, with the GPUs in its arguments open."""


@pytest.mark.parametrize("how", ["start", "regroup"])
@pytest.mark.parametrize("where", ["GPUs", "the host"])
def test_ranks_that_start_on_the_gpu_of_a_hot_spare_end_it(
    new_node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, how: str, where: str
) -> None:
    """It was started beside other ranks, before all restarted or one was replaced. One on another GPU stays, as do all that hold none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (root / "dev/nvidia2").touch()
    new_node.begin("--root", str(root))
    gpus = [str(root / f"dev/nvidia{minor}") for minor in (0, 1, 2)] if where == "GPUs" else []

    def place(rank: int, local_rank: int, generation: int = 1, **more: str) -> dict[str, str]:
        return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "HOLDFAST_GENERATION": str(generation), **more}

    with new_node.flow().attach(0) as flow:
        flow.prepare(new_node, [new_node.script(WAITS_ON_GPU), *gpus], warm=True)
        flow.ok("start", generation=1, membership={"node": [5]}, workers=[{"rank": 5, "environment": place(5, 2)}])
        flow.wait("resumed", rank=5)
        spares = [{"id": number, "environment": place(0, number, HOLDFAST_HOT_SPARE=str(number))} for number in (0, 1)]
        assert flow.ok("start-hot-spares", hot_spares=spares)["started"] == [0, 1]
        for number in (0, 1):
            flow.wait("hot-spare.ready", id=number)
        if how == "start":
            flow.ok("stop", generation=1, signal=9, grace=0.0)
            flow.wait("workers.exited", generation=1)
            flow.ok("start", generation=2, membership={"node": [6]}, workers=[{"rank": 6, "environment": place(6, 0, 2)}])
        else:
            seat = {"rank": 6, "from": "fresh", "environment": place(6, 0, 2)}
            flow.ok("regroup", generation=2, membership={"node": [6]}, facts={"since": 1}, workers=[seat], leave=0.0)
        if where == "GPUs":
            assert flow.wait("hot-spare.exited", id=0)["ordered"]
        flow.wait("resumed", rank=6)
        assert set(flow.ok("about", protocol=PROTOCOL)["hot_spares"]) == ({"1"} if where == "GPUs" else {"0", "1"})
