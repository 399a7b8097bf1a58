"""A memory store lives longer than whoever writes into it, and no longer than anybody needs it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.agent.memstore import manager
from holdfast.cluster.local import LocalNodes
from holdfast.host.process import kill, mark_of
from holdfast.memstore import shared_memory, store_folders
from tests.agent.rig import Flow, Node
from tests.mentions import mentions
from tests.waiting import wait_until

MEMORY = {"address": "127.0.0.1", "limit": None}

KEEPER = """
import os, time
from pathlib import Path
from holdfast.memstore.shared_memory import Label, Slot, word_sum
place = Path(os.environ["HOLDFAST_MEMSTORE"])
print("limit", os.environ["HOLDFAST_MEMSTORE_LIMIT"], flush=True)
slot = Slot(place / f"rank-{int(os.environ['RANK']):05}.0.snap")
label = Label(step=7, lineage=1, rank=int(os.environ["RANK"]), world=1, shard="p", part=0, parts=1, size=8, slice_bytes=8, time=time.time())
slot.begin(label)
slot.data[:] = b"whatever"
slot.seal(label, [word_sum(b"whatever")], [("w", (8,), "uint8", 8)], {})
Path(os.environ["DONE"]).touch()
time.sleep(600)
"""


def keeping(node: Node, flow: Flow, *, generation: int = 1) -> Path:
    """Have a worker put a snapshot into the memory store; return the memory store."""
    done = node.work / f"done-{generation}"
    environment = {"HOLDFAST_TOKEN": "secret", "PYTHONPATH": str(Path(shared_memory.__file__).parents[1]), "DONE": str(done)}
    flow.prepare(node, [sys.executable, node.script(KEEPER)], environment=environment, memory=MEMORY)
    flow.start(generation)
    wait_until(done.exists, seconds=60, explain=node.output)
    return store_folders.memstore_of(mark_of(node.folder), "job")


def test_workers_get_a_memory_store_of_their_own(node: Node, flow: Flow) -> None:
    """Nobody else may look into it; half of what is free is theirs unless the job says less."""
    place = keeping(node, flow)
    assert place.stat().st_mode & 0o777 == 0o700
    assert [label.step for label in shared_memory.labels(place).values()] == [7]
    assert 0 < int(node.output().split("limit ")[1]) <= manager.available_bytes(place)


def test_a_limit_of_the_job_holds(node: Node, flow: Flow) -> None:
    """In bytes."""
    flow.prepare(node, ["true"], memory={**MEMORY, "limit": 12345})
    assert flow.ok("about", protocol=1)["memory"]["limit"] == 12345


def test_a_snapshot_outlives_its_worker_and_the_next_one_finds_it(node: Node, flow: Flow) -> None:
    """Killed, stopped, started again: the file is the node's."""
    place = keeping(node, flow)
    kill(flow.pid(), signal.SIGKILL)
    flow.exited()
    assert [label.step for label in shared_memory.labels(place).values()] == [7]
    assert keeping(node, flow, generation=2) == place


def test_a_snapshot_outlives_the_agent(new_node: Node) -> None:
    """A second look brings a new agent up; the job's state is where it was."""
    node = new_node.begin()
    with node.flow() as flow:
        place = keeping(node, flow.attach(0))
        os.kill(node.agent, signal.SIGKILL)
        node.wait_until_empty()
        node.ended()
    assert [label.step for label in shared_memory.labels(place).values()] == [7]
    with node.begin().flow() as flow:
        flow.prepare(node, ["true"], memory=MEMORY)
        assert [label.step for label in shared_memory.labels(place).values()] == [7]
        flow.ok("end")
    assert node.ended() == 0
    assert node.memstores() == []


def test_an_agent_that_is_terminated_leaves_the_memory_store_to_the_next(new_node: Node) -> None:
    """It knows nothing about the job; its subreaper may have died."""
    node = new_node.begin()
    with node.flow() as flow:
        place = keeping(node, flow.attach(0))
    os.kill(node.agent, signal.SIGTERM)
    assert node.ended() == 0
    assert [label.step for label in shared_memory.labels(place).values()] == [7]


@pytest.mark.parametrize("how", ["end", "lease"])
def test_an_agent_that_ends_in_order_gives_the_memory_back(node: Node, flow: Flow, how: str) -> None:
    """The job is over, the node was released, or it has no controller."""
    place = keeping(node, flow)
    if how == "end":
        flow.ok("end")
    else:
        flow.prepare(node, ["true"], memory=MEMORY, lease=0.5)
    assert node.ended() == 0
    assert not place.exists()


def test_the_next_job_on_a_node_wipes_what_a_killed_agent_left(new_node: Node) -> None:
    """Also one that keeps nothing in memory itself. Other nodes' memory stores are theirs."""
    node, other = new_node.begin(), store_folders.memstore_of("another node", "job")
    store_folders.make(other)
    try:
        with node.flow() as flow:
            keeping(node, flow.attach(0))
            os.kill(node.agent, signal.SIGKILL)
            node.wait_until_empty()
            node.ended()
        with node.begin().flow(job="next") as flow:
            flow.prepare(node, ["true"], memory=MEMORY)
            assert node.memstores() == [store_folders.memstore_of(mark_of(node.folder), "next")]
            flow.prepare(node, ["true"])
            assert node.memstores() == []
        assert other.exists()
    finally:
        store_folders.wipe(other)


def test_without_a_memory_store_training_goes_on(new_node: Node, tmp_path: Path) -> None:
    """One event says why; no variable is set."""
    (tmp_path / "file").touch()
    node = new_node.begin(HOLDFAST_MEMSTORE_ROOT=str(tmp_path / "file"))
    with node.flow() as flow:
        flow.attach(0)
        script = node.script(
            "import os; print(sorted(name for name in os.environ if 'MEMSTORE' in name and name != 'HOLDFAST_MEMSTORE_ROOT'))"
        )
        assert flow.prepare(node, [sys.executable, script], memory=MEMORY)["memory"] is None
        why = flow.wait("memstore.unavailable", what="memstore")["why"]
        assert str(tmp_path / "file") in why
        flow.start(1)
        assert flow.exited()["code"] == 0
    assert node.output().endswith("\n[]\n")


def test_a_folder_of_another_user_is_not_used(new_node: Node, tmp_path: Path) -> None:
    """Nor one that others may write in: neither used nor emptied."""
    root = tmp_path / f"holdfast-{os.getuid()}"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    node = new_node.begin(HOLDFAST_MEMSTORE_ROOT=str(tmp_path))
    (root / store_folders.memstore_of(mark_of(node.folder), "old").name).symlink_to(precious)
    with node.flow() as flow:
        flow.attach(0)
        assert flow.prepare(node, ["true"], memory=MEMORY)["memory"] is None
        assert mentions(flow.wait("memstore.unavailable")["why"], "other users")
    assert (precious / "file").exists()


def test_a_power_cut_takes_the_memory(tmp_path: Path) -> None:
    """Of every job; and the flow's own way takes that of one job only."""
    nodes = LocalNodes("here", tmp_path, 2)
    places = [store_folders.memstore_of(mark_of(nodes.folder(node)), job) for node in nodes.names() for job in ("a", "b")]
    for place in places:
        store_folders.make(place)
    nodes.power_off("node-0")
    assert [place.exists() for place in places] == [False, False, True, True]
    nodes.wipe_memory("node-1", "a")
    assert [place.exists() for place in places] == [False, False, False, True]
    nodes.clear("node-1")
    assert not any(place.exists() for place in places)


def test_available_bytes_are_what_is_free_and_what_is_used_already(tmp_path: Path) -> None:
    """A memory store that is full must not look as if there were no room for it."""
    place = store_folders.root() / "one"
    store_folders.make(place)

    def changed() -> int:
        before = manager.available_bytes(place)
        with (place / "file").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2**29)
        try:
            return abs(manager.available_bytes(place) - before)
        finally:
            (place / "file").unlink()

    try:
        wait_until(lambda: changed() < 2**27, seconds=60, explain="others give and take memory meanwhile, but not all the time")
    finally:
        store_folders.wipe(place)
