"""Late actions that bypass agents: of a controller that was suspended, or from a network that was cut, after another one took over."""

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
from holdfast.host.process import boot_time, is_alive, mark_of
from holdfast.memstore import store_folders
from tests.cluster.proxies import Boxes, ChildTransport
from tests.waiting import wait_until

NAP = [sys.executable, "-c", "import time; time.sleep(600)"]
PLAN: dict[str, Any] = {
    "job": "job", "name": "named", "lease": 60.0, "warm": False, "watch": False, "python": "", "preload": [], "argv": NAP,
    "directory": "/", "log_directory": "", "environment": {},
}  # fmt: skip
NODE = "box-0"


class Controller:
    """A controller of the job, with its own proxies to the job's only node."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.reach = ChildTransport()
        self.nodes = RemoteNodes(Boxes(str(folder), names=[NODE]), self.reach)
        self.fleet = AgentPool(self.nodes, PLAN, epoch=epoch)

    def close(self) -> None:
        """Close the connections."""
        self.fleet.close(end=False)
        wait_until(self._is_quiet, seconds=60)
        self.reach.reap()

    def _is_quiet(self) -> bool:
        """Return whether nothing listens to a proxy any more."""
        return not any(known.node_proxy is not None and known.node_proxy.is_alive for known in self.nodes._known.values())


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[tuple[Controller, Controller]]:
    """Return two controllers; nothing of theirs outlives the test."""
    made = Controller(tmp_path, 1), Controller(tmp_path, 2)
    yield made
    for controller in made:
        controller.close()
    last = Controller(tmp_path, 0)
    last.nodes.fence(NODE)
    last.close()


def worker_of(controller: Controller) -> int:
    """Start a worker, and return its pid."""
    client = controller.fleet.bring_up(NODE)
    client.send_command("start", generation=1, membership={NODE: [0]}, workers=[{"rank": 0, "environment": {}}])
    while (event := controller.fleet.event_queue.get(timeout=60)[1])["event"] != "worker.started":
        pass
    return int(event["pid"])


@pytest.mark.parametrize("send_command", ["fence", "wipe"])
def test_an_action_that_waited_in_a_connection_during_a_take_over_is_refused(
    controllers: tuple[Controller, Controller], send_command: str
) -> None:
    """It was sent in time and is read after another controller has taken the lease, as after a cut of the network."""
    first, second = controllers
    pid = worker_of(first)
    (node_proxy,) = [pipe.child for pipe in first.reach.pipes]
    place = store_folders.memstore_of(mark_of(second.nodes.folder(NODE)), "job")
    store_folders.make(place)
    os.kill(node_proxy.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as hand:
        given = hand.submit(getattr(first.fleet, send_command), NODE)
        second.fleet.reattach(NODE)
        os.kill(node_proxy.pid, signal.SIGCONT)
        with pytest.raises(LeaseLost, match=r"a newer controller \(epoch 2\)"):
            given.result(60)
    assert is_alive(pid, None)
    assert place.is_dir()
    assert first.fleet.superseded_by == 2
    store_folders.wipe(place)


def test_the_newest_epoch_outlives_the_agents_that_knew_it(controllers: tuple[Controller, Controller]) -> None:
    """A late controller ends, starts and wipes nothing on a node whose agents have died since, nor does it accept a new one as its own."""
    first, second = controllers
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


def test_an_action_after_its_deadline_is_not_begun(controllers: tuple[Controller, Controller], tmp_path: Path) -> None:
    """The node may know no other controller yet; the sender's lease may be lost all the same."""
    first, _ = controllers
    pid = worker_of(first)

    def late() -> FencingToken:
        return FencingToken(job="job", epoch=1, until=boot_time() - 60)

    local = LocalNodes("boxes", tmp_path / "nodes", 1)  # the same folders, seen without gates
    for source, node in ((first.nodes, NODE), (local, NODE)):
        for act in (lambda: source.fence(node, "job", late), lambda: source.wipe_memory(node, "job", late)):  # noqa: B023 (called at once)
            with pytest.raises(NodeError, match=r"\d s after the time"):
                act()
        with pytest.raises(NodeError, match=r"\d s after the time"):
            source.start_agent(node, late)
    assert is_alive(pid, None)
    assert first.nodes.fence(NODE, "job", lambda: first.fleet.confirm(NODE))
    wait_until(lambda: not is_alive(pid, None), seconds=60)


def test_a_controller_with_an_unconfirmed_lease_does_not_bypass_agents(
    controllers: tuple[Controller, Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent's answer confirms it; one that knows a newer controller denies it; without any it stays unconfirmed."""
    first, second = controllers
    monkeypatch.setattr(fleets, "CONFIRM_SECONDS", 0.3)
    sure = first.fleet.lease_until
    first.fleet.lease_until = lambda: 0.0
    with pytest.raises(LeaseUnconfirmed) as unconfirmed:
        first.fleet.bring_up(NODE)
    assert unconfirmed.value.node == NODE
    with pytest.raises(LeaseUnconfirmed):  # not "the node does not answer", which would be held against it
        first.fleet.recheck(NODE)
    first.fleet.lease_until = sure
    first.fleet.bring_up(NODE)
    first.fleet.lease_until = lambda: 0.0
    monkeypatch.setattr(fleets, "CONFIRM_SECONDS", 60.0)
    asked = boot_time()
    assert first.fleet.confirm(NODE).until > asked
    second.fleet.reattach(NODE)
    first.fleet._witnessed = 0.0
    with pytest.raises(LeaseLost):
        first.fleet.confirm(NODE)


class TakenOver(LocalNodes):
    """A node that another controller takes over right after it was fenced."""

    def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
        """End everything; then the other controller takes over."""
        killed = super().fence(node, job, confirm)
        Epochs(self.folder(node)).record("job", 2)
        return killed


def test_the_lease_is_confirmed_again_between_the_fence_and_the_wipe(tmp_path: Path) -> None:
    """What the next controller finds in the node's memory stays."""
    nodes = TakenOver("c", tmp_path, 1)
    nodes.folder("node-0").mkdir(parents=True)
    place = store_folders.memstore_of(mark_of(nodes.folder("node-0")), "job")
    store_folders.make(place)
    fleet = AgentPool(nodes, PLAN, epoch=1)
    with pytest.raises(LeaseLost):
        fleet.clear("node-0")
    assert place.is_dir()
    store_folders.wipe(place)
    fleet.close(end=False)


def test_an_unconfirmed_cleaning_is_made_up_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local node, too, that was dropped while the lease was unconfirmed is cleaned and free afterwards."""
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


def test_epochs_only_grow_and_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    """Each job has its own; of many the oldest are forgotten."""
    epochs = Epochs(tmp_path)
    assert epochs.of("a") == 0
    epochs.record("a", 5)
    epochs.record("a", 3)
    epochs.record("b", 1)
    assert (epochs.of("a"), epochs.of("b")) == (5, 1)
    with pytest.raises(Exception, match="epoch 5, yours 4"):
        epochs.admit(FencingToken(job="a", epoch=4, until=boot_time() + 9))
    for number in range(300):
        epochs.record(f"j{number}", 1)
    assert (epochs.of("a"), epochs.of("j299")) == (0, 1)
    for text in ("", "[[[", "[1]", '{"a": "x"}', "[" * 100_000):
        (tmp_path / "epochs.json").write_text(text)
        assert epochs.of("a") == 0
    epochs.record("a", 7)
    assert epochs.of("a") == 7


def test_a_proxy_that_reports_ever_newer_epochs_is_a_failed_node(tmp_path: Path) -> None:
    """The history is read once, and says that the lease is this controller's: then the node is not believed."""

    class Lying(LocalNodes):
        def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
            assert confirm is not None
            raise Superseded(node, "a newer controller runs this job", confirm().epoch + 1)

    fleet, asked = AgentPool(Lying("c", tmp_path, 1), PLAN, epoch=1), list[int]()

    def raise_epoch(epoch: int) -> int:
        asked.append(epoch)
        return epoch + 1

    fleet.raise_epoch = raise_epoch
    fleet.clear("node-0")
    assert (asked, fleet.uncleaned, fleet.superseded_by) == ([2], {"node-0"}, 0)
    fleet.close(end=False)
