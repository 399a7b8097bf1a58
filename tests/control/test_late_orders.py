"""Orders that go past agents and come late: of a flow that stood still, or out of a network that was cut, while another flow took over."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.node.epochs import Epochs, FencingToken
from holdfast.cluster.interface import Confirm
from holdfast.cluster.local import LocalNodes
from holdfast.cluster.remote import RemoteNodes
from holdfast.control.agents import pool as fleets
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.pool import AgentPool
from holdfast.errors import LeaseLost, LeaseUnconfirmed, NodeError, Superseded
from holdfast.memstore import store_folders
from holdfast.process import boot_time, is_alive, mark_of
from tests.cluster.proxies import Boxes, ChildReach
from tests.waiting import wait_until

NAP = [sys.executable, "-c", "import time; time.sleep(600)"]
PLAN: dict[str, Any] = {
    "job": "job", "name": "named", "lease": 60.0, "warm": False, "watch": False, "python": "", "preload": [], "argv": NAP,
    "directory": "/", "log_directory": "", "environment": {},
}  # fmt: skip
NODE = "box-0"


class Flow:
    """A flow of the job, with gates of its own to the one node that the job has."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.reach = ChildReach()
        self.nodes = RemoteNodes(Boxes(str(folder), names=[NODE]), self.reach)
        self.fleet = AgentPool(self.nodes, PLAN, epoch=epoch)

    def close(self) -> None:
        """Part from the node."""
        self.fleet.close(end=False)
        wait_until(self._is_quiet, seconds=60)
        self.reach.bury()

    def _is_quiet(self) -> bool:
        """Tell whether nobody listens to a gate any more."""
        return not any(known.node_proxy is not None and known.node_proxy.is_alive for known in self.nodes._known.values())


@pytest.fixture
def flows(tmp_path: Path) -> Iterator[tuple[Flow, Flow]]:
    """Give two flows; nothing of theirs outlives the test."""
    made = Flow(tmp_path, 1), Flow(tmp_path, 2)
    yield made
    for flow in made:
        flow.close()
    last = Flow(tmp_path, 0)
    last.nodes.fence(NODE)
    last.close()


def worker_of(flow: Flow) -> int:
    """Have a worker run, and return its pid."""
    client = flow.fleet.bring_up(NODE)
    client.send_command("start", generation=1, membership={NODE: [0]}, workers=[{"rank": 0, "environment": {}}])
    while (event := flow.fleet.event_queue.get(timeout=60)[1])["event"] != "worker.started":
        pass
    return int(event["pid"])


@pytest.mark.parametrize("send_command", ["fence", "wipe"])
def test_an_order_that_lay_in_a_connection_while_another_flow_took_over_is_refused(flows: tuple[Flow, Flow], send_command: str) -> None:
    """It was given in time; the far end reads it when the new flow steers already, as after a cut of the network that heals."""
    first, second = flows
    pid = worker_of(first)
    (node_proxy,) = [pipe.child for pipe in first.reach.pipes]
    place = store_folders.memstore_of(mark_of(second.nodes.folder(NODE)), "job")
    store_folders.make(place)
    os.kill(node_proxy.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as hand:
        given = hand.submit(getattr(first.fleet, send_command), NODE)
        second.fleet.reattach(NODE)
        os.kill(node_proxy.pid, signal.SIGCONT)
        with pytest.raises(LeaseLost, match=r"a newer flow \(epoch 2\)"):
            given.result(60)
    assert is_alive(pid, None)
    assert place.is_dir()
    assert first.fleet.superseded_by == 2
    store_folders.wipe(place)


def test_the_newest_epoch_outlives_the_agents_that_heard_of_it(flows: tuple[Flow, Flow]) -> None:
    """A late flow ends, starts and wipes nothing on a node whose agents have died since, nor takes a fresh one for its own."""
    first, second = flows
    worker_of(first)
    second.fleet.reattach(NODE)
    assert second.nodes.fence(NODE), "as if all had died of itself"
    for act in (first.fleet.fence, first.fleet.wipe, first.fleet.bring_up):
        with pytest.raises(LeaseLost):
            act(NODE)
    assert second.nodes.survey()[0].status == "idle"
    second.nodes.start_agent(NODE, lambda: second.fleet.confirm(NODE))
    late = AgentClient(NODE, lambda: first.nodes.connect(NODE), first.fleet.event_queue, epoch=1, job="job")
    with pytest.raises(LeaseLost):
        late.send_command("prepare", **PLAN)
    late.close()
    worker_of(second)


def test_an_order_that_comes_after_its_deadline_is_not_begun(flows: tuple[Flow, Flow], tmp_path: Path) -> None:
    """Nobody may know of another flow there yet; the sender's lease may have gone all the same."""
    first, _ = flows
    pid = worker_of(first)

    def late() -> FencingToken:
        return FencingToken(job="job", epoch=1, until=boot_time() - 60)

    local = LocalNodes("boxes", tmp_path / "nodes", 1)  # the same folders, seen without gates
    for source, node in ((first.nodes, NODE), (local, NODE)):
        for act in (lambda: source.fence(node, "job", late), lambda: source.wipe_memory(node, "job", late)):  # noqa: B023 (called at once)
            with pytest.raises(NodeError, match="after the time for which its flow was sure"):
                act()
        with pytest.raises(NodeError, match="after the time for which its flow was sure"):
            source.start_agent(node, late)
    assert is_alive(pid, None)
    assert first.nodes.fence(NODE, "job", lambda: first.fleet.confirm(NODE))
    wait_until(lambda: not is_alive(pid, None), seconds=60)


def test_who_cannot_say_whether_the_lease_is_still_his_does_nothing_past_agents(
    flows: tuple[Flow, Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that answers is word enough; one that knows of a newer flow is word against it; none at all is none."""
    first, second = flows
    monkeypatch.setattr(fleets, "CONFIRM_SECONDS", 0.3)
    sure = first.fleet.lease_until
    first.fleet.lease_until = lambda: 0.0
    with pytest.raises(LeaseUnconfirmed, match="could not be renewed in time, and none of its agents"):
        first.fleet.bring_up(NODE)
    with pytest.raises(LeaseUnconfirmed):  # not "the node does not answer", which would be held against it
        first.fleet.recheck(NODE)
    first.fleet.lease_until = sure
    first.fleet.bring_up(NODE)
    first.fleet.lease_until = lambda: 0.0
    assert first.fleet.confirm(NODE).until > boot_time()
    second.fleet.reattach(NODE)
    first.fleet._witnessed = 0.0
    with pytest.raises(LeaseLost):
        first.fleet.confirm(NODE)


class Overtaken(LocalNodes):
    """A node of which another flow takes possession right after it was fenced."""

    def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
        """End all; then comes the other flow."""
        killed = super().fence(node, job, confirm)
        Epochs(self.folder(node)).note("job", 2)
        return killed


def test_between_the_fence_and_the_wipe_it_is_asked_again(tmp_path: Path) -> None:
    """What the next flow finds in the node's memory is not taken from it."""
    nodes = Overtaken("c", tmp_path, 1)
    nodes.folder("node-0").mkdir(parents=True)
    place = store_folders.memstore_of(mark_of(nodes.folder("node-0")), "job")
    store_folders.make(place)
    fleet = AgentPool(nodes, PLAN, epoch=1)
    with pytest.raises(LeaseLost):
        fleet.clear("node-0")
    assert place.is_dir()
    store_folders.wipe(place)
    fleet.close(end=False)


def test_what_could_not_be_confirmed_is_done_once_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of this machine, too, that was let go of while nobody knew who steers is ended and free again afterwards."""
    monkeypatch.setattr(fleets, "CONFIRM_SECONDS", 0.1)
    nodes = LocalNodes("c", tmp_path, 1)
    fleet = AgentPool(nodes, {**PLAN, "memory": None}, epoch=1)
    sure = fleet.lease_until
    nodes.start_agent("node-0")
    fleet.lease_until = lambda: 0.0
    fleet.clear("node-0")
    assert (fleet.uncleaned, nodes.survey()[0].status, fleet.free()) == ({"node-0"}, "up", [])
    fleet.lease_until = sure

    def is_free() -> bool:
        fleet.ping()
        return fleet.free() == ["node-0"]

    wait_until(is_free, seconds=60)
    assert nodes.survey()[0].status == "idle"
    fleet.close(end=False)


def test_epochs_only_grow_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    """Each job has its own; of many the oldest are forgotten."""
    epochs = Epochs(tmp_path)
    assert epochs.of("a") == 0
    epochs.note("a", 5)
    epochs.note("a", 3)
    epochs.note("b", 1)
    assert (epochs.of("a"), epochs.of("b")) == (5, 1)
    with pytest.raises(Exception, match="epoch 5, yours 4"):
        epochs.admit(FencingToken(job="a", epoch=4, until=boot_time() + 9))
    for number in range(300):
        epochs.note(f"j{number}", 1)
    assert (epochs.of("a"), epochs.of("j299")) == (0, 1)
    for text in ("", "[[[", "[1]", '{"a": "x"}', "[" * 100_000):
        (tmp_path / "epochs.json").write_text(text)
        assert epochs.of("a") == 0
    epochs.note("a", 7)
    assert epochs.of("a") == 7


def test_a_gate_that_names_ever_newer_flows_is_a_node_in_trouble_and_ends_nobody(tmp_path: Path) -> None:
    """The history is asked once, and says that the lease is this flow's: then it is that node that is not to be believed."""

    class Lying(LocalNodes):
        def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
            assert confirm is not None
            raise Superseded(node, confirm().epoch + 1, "a newer flow steers this job")

    fleet, asked = AgentPool(Lying("c", tmp_path, 1), PLAN, epoch=1), list[int]()

    def raise_epoch(epoch: int) -> int:
        asked.append(epoch)
        return epoch + 1

    fleet.raise_epoch = raise_epoch
    fleet.clear("node-0")
    assert (asked, fleet.uncleaned, fleet.superseded_by) == ([2], {"node-0"}, 0)
    fleet.close(end=False)
