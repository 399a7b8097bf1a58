"""Nodes that are other machines: what is asked of them goes through gates, and a connection that ends is not a node that ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.event_log import EVENT_LOG, EventLog
from holdfast.cluster.remote import RemoteNodes
from holdfast.control.agents.pool import AgentPool
from holdfast.errors import AgentDisconnected, NodeLost, NodeStateUnknown
from holdfast.process import NODE_MARK, mark_of, marked
from holdfast.protocol import Message
from tests.cluster.proxies import Boxes, ChildReach
from tests.waiting import wait_until

SECONDS = 60
NAP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def reach() -> Iterator[ChildReach]:
    """Give a way to nodes."""
    made = ChildReach()
    yield made
    made.bury()


@pytest.fixture
def nodes(reach: ChildReach, tmp_path: Path) -> Iterator[RemoteNodes]:
    """Give two nodes."""
    made = RemoteNodes(Boxes(str(tmp_path / "hf")), reach)
    yield made
    reach.down = False
    made.close()
    last = RemoteNodes(Boxes(str(tmp_path / "hf")), reach)
    for node in last.names():
        last.fence(node)
    last.close()


def remains(nodes: RemoteNodes, node: str) -> list[int]:
    """Return what carries the mark of *node*."""
    return list(marked(NODE_MARK, mark_of(nodes.folder(node))))


def plan(tmp_path: Path) -> dict[str, Any]:
    """Return how a job is run that does nothing."""
    how = {"warm": False, "python": "", "preload": [], "argv": NAP, "directory": "/", "log_directory": "", "environment": {}}
    return {"job": "job", "name": "named", "lease": 60.0, **how}


class Talk:
    """A fleet of one node with a worker, and what was heard."""

    def __init__(self, nodes: RemoteNodes, tmp_path: Path) -> None:
        self.fleet = AgentPool(nodes, plan(tmp_path), epoch=1)
        self.channel = self.fleet.bring_up("box-0")
        self.heard: list[Message] = []
        workers = [{"rank": 0, "environment": {}}]
        self.channel.send_command("start", generation=1, membership={"box-0": [0]}, workers=workers)
        self.pid = int(self.wait("worker.started")["pid"])

    def wait(self, name: str, seconds: float = SECONDS) -> Message:
        """Wait for an event."""
        until = time.monotonic() + seconds
        while True:
            for event in self.heard:
                if event["event"] == name:
                    return event
            self.heard.append(self.fleet.event_queue.get(timeout=max(0.01, until - time.monotonic()))[1])


def settled(talk: Talk) -> bool:
    """Do what a flow does once a second; tell whether nothing is owed any more."""
    talk.fleet.ping()
    return not talk.fleet.uncleaned


@pytest.fixture
def talk(nodes: RemoteNodes, tmp_path: Path) -> Iterator[Talk]:
    """Give a node with a worker on it."""
    made = Talk(nodes, tmp_path)
    yield made
    made.fleet.close(end=False)


def test_a_node_is_looked_at_started_and_fenced_through_its_gate(nodes: RemoteNodes, tmp_path: Path) -> None:
    """The agent is the node's own, with its files in its folder there."""
    assert [view.status for view in nodes.survey()] == ["idle", "idle"]
    nodes.start_agent("box-0")
    assert nodes.folder("box-0") == tmp_path / "hf/nodes/box-0"
    assert [(view.name, view.status) for view in nodes.survey()] == [("box-0", "up"), ("box-1", "idle")]
    assert nodes.is_reachable("box-0")
    with pytest.raises(ConnectionRefusedError):
        nodes.connect("box-1")
    killed = nodes.fence("box-0")
    assert killed
    assert remains(nodes, "box-0") == []
    assert nodes.survey()[0].status == "idle"


def test_a_job_gets_what_is_the_nodes_own(nodes: RemoteNodes) -> None:
    """Its interpreter, and a place for logs there."""
    node_settings = nodes.node_settings("box-0", "named")
    assert node_settings["python"] == sys.executable
    assert node_settings["log_directory"].endswith("hf/jobs/named/logs")


def test_a_connection_that_ends_is_sought_anew_and_what_was_missed_is_told(talk: Talk, reach: ChildReach) -> None:
    """The worker ends while nobody listens; it is known as soon as somebody does, and its start is not told twice."""
    reach.cut()
    wait_until(lambda: talk.channel.failed_attempts, seconds=SECONDS)
    assert talk.fleet.cut_off().keys() == {"box-0"}
    assert not talk.fleet.disconnected()
    os.kill(talk.pid, signal.SIGKILL)
    reach.down = False
    assert talk.wait("worker.exited")["rank"] == 0
    assert not talk.fleet.cut_off()
    assert [event["event"] for event in talk.heard].count("worker.started") == 1
    assert talk.channel.about()["workers"] == {}


def test_an_order_is_carried_out_once_whatever_its_connection_does(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer got lost with the connection; given again, it would be refused by an agent that did not know it."""
    channel, took = talk.channel, talk.channel._dispatch
    os.kill(talk.pid, signal.SIGKILL)
    talk.wait("worker.exited")

    def lose(message: Message) -> None:
        if "started" in message:
            monkeypatch.setattr(channel, "_dispatch", took)
            channel._socket.shutdown(socket.SHUT_RDWR)
        else:
            took(message)

    monkeypatch.setattr(channel, "_dispatch", lose)
    workers = [{"rank": 0, "environment": {}}]
    answer = channel.send_command("start", seconds=SECONDS, generation=2, membership={"box-0": [0]}, workers=workers)
    assert answer["started"] == [0]
    assert channel._dispatch == took, "the first answer did not get lost"


def test_an_agent_that_is_gone_is_not_sought(talk: Talk) -> None:
    """Its node answers and says that nobody listens."""
    os.kill(int(talk.channel.about()["pid"]), signal.SIGKILL)
    assert "nothing listens" in talk.wait("agent.disconnected")["why"]
    assert talk.fleet.disconnected().keys() == {"box-0"}
    with pytest.raises(AgentDisconnected):
        talk.channel.send_command("ping")


def test_another_agent_on_the_node_is_not_taken_for_the_one_before(talk: Talk, nodes: RemoteNodes, reach: ChildReach) -> None:
    """It knows nothing of the generation."""
    reach.cut()
    wait_until(lambda: talk.channel.failed_attempts, seconds=SECONDS)
    reach.down, other = False, RemoteNodes(nodes._cluster, reach)
    talk.channel._connect = lambda: (_ for _ in ()).throw(TimeoutError())  # not before the other one serves
    other.fence("box-0")
    other.start_agent("box-0")
    talk.channel._connect = lambda: nodes.connect("box-0")
    assert "another agent" in talk.wait("agent.disconnected")["why"]
    other.close()


def test_a_connection_that_stalls_is_replaced_when_its_node_answers(talk: Talk, reach: ChildReach) -> None:
    """Nothing ends, nothing comes: only a new connection tells that it was not the agent, and that is no fault of anything."""
    reach.stall()
    wait_until(lambda: talk.fleet.silent(1.0), seconds=SECONDS)
    assert not talk.channel.lost_reason
    reach.down = False
    assert talk.fleet.recheck("box-0") is None
    assert talk.channel.about()["workers"] == {"0": talk.pid}


def test_a_node_that_does_not_answer_a_second_look_is_lost(talk: Talk, reach: ChildReach) -> None:
    """Neither over the connection that stalls nor over a new one."""
    reach.stall()
    wait_until(lambda: talk.fleet.silent(1.0), seconds=SECONDS)
    assert talk.fleet.recheck("box-0") is False
    reach.down = False


def test_a_node_that_was_let_go_of_unreached_is_fenced_once_it_can_be(talk: Talk, nodes: RemoteNodes, reach: ChildReach) -> None:
    """Whatever it still runs is ended, beside what the flow does."""
    reach.cut()
    wait_until(lambda: talk.channel.failed_attempts, seconds=SECONDS)
    talk.fleet.drop("box-0")
    assert talk.fleet.uncleaned == {"box-0"}
    assert talk.pid in marked(NODE_MARK, mark_of(nodes.folder("box-0")))
    assert nodes.survey()[0].status == "off"
    reach.down = False
    wait_until(lambda: settled(talk), seconds=SECONDS)
    assert remains(nodes, "box-0") == []


def test_a_gate_of_another_version_is_refused_with_the_cure(tmp_path: Path) -> None:
    """Both versions are named."""
    reach = ChildReach([sys.executable, "-c", "print('holdfast-gate {\"protocol\": 99}', flush=True); input()"])
    nodes = RemoteNodes(Boxes(str(tmp_path)), reach)
    with pytest.raises(NodeStateUnknown, match=r"speaks protocol 99, this one \d+: `holdfast nodes bootstrap"):
        nodes.node_proxy("box-0")
    seen = nodes.survey()[0]
    assert "box-0" not in seen.why, "beside the node's name it says the reason alone"
    assert "speaks protocol 99" in seen.why
    assert "`holdfast nodes bootstrap" in seen.why
    reach.bury()


def test_what_a_login_shell_prints_is_passed_over(tmp_path: Path) -> None:
    """As long as it ends some time."""
    proxy = "[os.sys.executable, '-m', 'holdfast.agent.node.proxy']"
    shell = f"import os; print('Welcome!\\n' * 9, flush=True); os.execv(os.sys.executable, {proxy})"
    reach = ChildReach([sys.executable, "-c", shell])
    nodes = RemoteNodes(Boxes(str(tmp_path)), reach)
    assert nodes.survey()[0].status == "idle"
    nodes.close()
    reach.bury()
    endless = ChildReach([sys.executable, "-c", "while True: print('Welcome!' * 100, flush=True)"])
    with pytest.raises(NodeStateUnknown, match="login shell prints more than 64 KiB"):
        RemoteNodes(Boxes(str(tmp_path)), endless).node_proxy("box-0")
    endless.bury()


def test_a_program_that_never_greets_is_a_lost_node(tmp_path: Path) -> None:
    """In time, and its pipe is closed."""
    reach = ChildReach([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises((NodeLost, NodeStateUnknown)):
        RemoteNodes(Boxes(str(tmp_path)), reach).node_proxy("box-0", seconds=0.3)
    assert reach.pipes[0].child.wait(SECONDS) < 0
    reach.bury()


def test_bandwidth_between_two_nodes_is_measured_by_sending(nodes: RemoteNodes) -> None:
    """Over a real connection, and no longer than asked for."""
    assert nodes.bandwidth("box-0", "box-1", 0.05) > 1e6


def test_what_an_agent_journaled_is_heard_through_the_gate_when_it_is_gone(nodes: RemoteNodes) -> None:
    """Of the job that is asked for, and no other."""
    nodes.survey()
    folder = nodes.folder("box-0")
    folder.mkdir(parents=True)
    event_log = EventLog(folder / EVENT_LOG)
    event_log.hold("job")
    event_log.add({"event": "steps", "generation": 1, "steps": [[5, 1.0, 0.1, 0.5]]}, milestone=False)
    (event,) = nodes.recent_events("box-0", "job")
    assert event["steps"] == [[5, 1.0, 0.1, 0.5]]
    assert nodes.recent_events("box-0", "another") == []
    assert nodes.recent_events("box-1", "job") == []
