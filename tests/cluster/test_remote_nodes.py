"""Nodes on other machines: commands go through their proxies, and a lost connection is not a lost node."""

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
from holdfast.errors import AgentDisconnected, NodeLost, NodeStateUnknown, ProtocolMismatch
from holdfast.host.process import NODE_MARK, mark_of, marked
from holdfast.protocol import PROTOCOL, Message
from tests.cluster.proxies import Boxes, ChildTransport
from tests.mentions import mentions
from tests.waiting import wait_until

SECONDS = 60
NAP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def transport() -> Iterator[ChildTransport]:
    """Give a way to nodes."""
    made = ChildTransport()
    yield made
    made.reap()


@pytest.fixture
def nodes(transport: ChildTransport, tmp_path: Path) -> Iterator[RemoteNodes]:
    """Give two nodes."""
    made = RemoteNodes(Boxes(str(tmp_path / "hf")), transport)
    yield made
    transport.down = False
    made.close()
    last = RemoteNodes(Boxes(str(tmp_path / "hf")), transport)
    for node in last.names():
        last.fence(node)
    last.close()


def processes_of(nodes: RemoteNodes, node: str) -> list[int]:
    """Return what carries the mark of *node*."""
    return list(marked(NODE_MARK, mark_of(nodes.folder(node))))


def plan(tmp_path: Path) -> dict[str, Any]:
    """Return how a job is run that does nothing."""
    how = {"warm": False, "python": "", "preload": [], "argv": NAP, "directory": "/", "log_directory": "", "environment": {}}
    return {"job": "job", "name": "named", "lease": 60.0, **how}


class ConnectedAgent:
    """An agent pool of one node with a worker, and the events received."""

    def __init__(self, nodes: RemoteNodes, tmp_path: Path) -> None:
        self.pool = AgentPool(nodes, plan(tmp_path), epoch=1)
        self.channel = self.pool.bring_up("box-0")
        self.received: list[Message] = []
        workers = [{"rank": 0, "environment": {}}]
        self.channel.send_command("start", generation=1, membership={"box-0": [0]}, workers=workers)
        self.pid = int(self.wait("worker.started")["pid"])

    def wait(self, name: str, seconds: float = SECONDS) -> Message:
        """Wait for an event."""
        until = time.monotonic() + seconds
        while True:
            for event in self.received:
                if event["event"] == name:
                    return event
            self.received.append(self.pool.event_queue.get(timeout=max(0.01, until - time.monotonic()))[1])


def settled(connected: ConnectedAgent) -> bool:
    """Do what a controller does once a second; return whether no cleanup is pending."""
    connected.pool.ping()
    return not connected.pool.uncleaned


@pytest.fixture
def connected(nodes: RemoteNodes, tmp_path: Path) -> Iterator[ConnectedAgent]:
    """Give a node with a worker on it."""
    made = ConnectedAgent(nodes, tmp_path)
    yield made
    made.pool.close(end=False)


def test_a_node_is_surveyed_started_and_fenced_through_its_proxy(nodes: RemoteNodes, tmp_path: Path) -> None:
    """The agent runs on the node, with its files in its folder there."""
    assert [view.status for view in nodes.survey()] == ["idle", "idle"]
    nodes.start_agent("box-0")
    assert nodes.folder("box-0") == tmp_path / "hf/nodes/box-0"
    assert [(view.name, view.status) for view in nodes.survey()] == [("box-0", "up"), ("box-1", "idle")]
    assert nodes.is_reachable("box-0")
    with pytest.raises(ConnectionRefusedError):
        nodes.connect("box-1")
    killed = nodes.fence("box-0")
    assert killed
    assert processes_of(nodes, "box-0") == []
    assert nodes.survey()[0].status == "idle"


def test_a_job_gets_the_settings_of_the_node(nodes: RemoteNodes) -> None:
    """Its interpreter, and a folder for logs there."""
    node_settings = nodes.node_settings("box-0", "named")
    assert node_settings["python"] == sys.executable
    assert node_settings["log_directory"].endswith("hf/jobs/named/logs")


def test_a_lost_connection_is_reopened_and_missed_events_are_replayed(connected: ConnectedAgent, transport: ChildTransport) -> None:
    """The worker exits while the connection is down: that is reported once it is up again, and the start is not reported twice."""
    transport.cut()
    wait_until(lambda: connected.channel.failed_attempts, seconds=SECONDS)
    assert connected.pool.cut_off().keys() == {"box-0"}
    assert not connected.pool.disconnected()
    os.kill(connected.pid, signal.SIGKILL)
    transport.down = False
    assert connected.wait("worker.exited")["rank"] == 0
    assert not connected.pool.cut_off()
    assert [event["event"] for event in connected.received].count("worker.started") == 1
    assert connected.channel.about()["workers"] == {}


def test_a_command_is_executed_once_whatever_happens_to_its_connection(connected: ConnectedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer was lost with the connection; sent again, it would be refused by an agent that does not know it."""
    channel, took = connected.channel, connected.channel._dispatch
    os.kill(connected.pid, signal.SIGKILL)
    connected.wait("worker.exited")

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


def test_no_connection_is_tried_to_an_agent_that_exited(connected: ConnectedAgent) -> None:
    """Its node is reachable and reports that no agent listens."""
    os.kill(int(connected.channel.about()["pid"]), signal.SIGKILL)
    assert "nothing listens" in connected.wait("agent.disconnected")["why"]
    assert connected.pool.disconnected().keys() == {"box-0"}
    with pytest.raises(AgentDisconnected):
        connected.channel.send_command("ping")


def test_a_new_agent_on_the_node_is_not_taken_for_the_previous_one(
    connected: ConnectedAgent, nodes: RemoteNodes, transport: ChildTransport
) -> None:
    """It knows nothing of the generation."""
    transport.cut()
    wait_until(lambda: connected.channel.failed_attempts, seconds=SECONDS)
    transport.down, other = False, RemoteNodes(nodes._cluster, transport)
    connected.channel._connect = lambda: (_ for _ in ()).throw(TimeoutError())  # not before the other one serves
    other.fence("box-0")
    other.start_agent("box-0")
    connected.channel._connect = lambda: nodes.connect("box-0")
    assert "another agent" in connected.wait("agent.disconnected")["why"]
    other.close()


def test_a_connection_that_stalls_is_replaced_when_its_node_answers(connected: ConnectedAgent, transport: ChildTransport) -> None:
    """Nothing ends and nothing arrives: only a new connection shows that it was not the agent, and no fault is recorded."""
    transport.stall()
    wait_until(lambda: connected.pool.silent(1.0), seconds=SECONDS)
    assert not connected.channel.lost_reason
    transport.down = False
    assert connected.pool.recheck("box-0") is None
    assert connected.channel.about()["workers"] == {"0": connected.pid}


def test_a_node_that_fails_the_second_check_is_lost(connected: ConnectedAgent, transport: ChildTransport) -> None:
    """Neither over the stalled connection nor over a new one."""
    transport.stall()
    wait_until(lambda: connected.pool.silent(1.0), seconds=SECONDS)
    assert connected.pool.recheck("box-0") is False
    transport.down = False


def test_an_unreachable_node_that_was_dropped_is_fenced_once_it_is_reachable(
    connected: ConnectedAgent, nodes: RemoteNodes, transport: ChildTransport
) -> None:
    """What still runs there is ended, while the controller goes on."""
    transport.cut()
    wait_until(lambda: connected.channel.failed_attempts, seconds=SECONDS)
    connected.pool.drop("box-0")
    assert connected.pool.uncleaned == {"box-0"}
    assert connected.pid in marked(NODE_MARK, mark_of(nodes.folder("box-0")))
    assert nodes.survey()[0].status == "off"
    transport.down = False
    wait_until(lambda: settled(connected), seconds=SECONDS)
    assert processes_of(nodes, "box-0") == []


def test_a_proxy_of_another_version_is_refused_with_the_cure(tmp_path: Path) -> None:
    """The error names both versions."""
    transport = ChildTransport([sys.executable, "-c", "print('holdfast-proxy {\"protocol\": 99}', flush=True); input()"])
    nodes = RemoteNodes(Boxes(str(tmp_path)), transport)
    with pytest.raises(ProtocolMismatch) as other:
        nodes.node_proxy("box-0")
    assert other.value.node == "box-0"
    assert mentions(other.value.why, "protocol 99", PROTOCOL)
    assert mentions(str(other.value), "holdfast node bootstrap --cluster CLUSTER_FILE")
    seen = nodes.survey()[0]
    assert "box-0" not in seen.why, "beside the node's name it says the reason alone"
    assert "speaks protocol 99" in seen.why
    assert "`holdfast node bootstrap" in seen.why
    transport.reap()


def test_output_of_a_login_shell_is_skipped(tmp_path: Path) -> None:
    """As long as it ends."""
    proxy = "[os.sys.executable, '-m', 'holdfast.agent.node.proxy']"
    shell = f"import os; print('Welcome!\\n' * 9, flush=True); os.execv(os.sys.executable, {proxy})"
    transport = ChildTransport([sys.executable, "-c", shell])
    nodes = RemoteNodes(Boxes(str(tmp_path)), transport)
    assert nodes.survey()[0].status == "idle"
    nodes.close()
    transport.reap()
    endless = ChildTransport([sys.executable, "-c", "while True: print('Welcome!' * 100, flush=True)"])
    with pytest.raises(NodeStateUnknown, match="64 KiB"):
        RemoteNodes(Boxes(str(tmp_path)), endless).node_proxy("box-0")
    endless.reap()


@pytest.mark.long
def test_a_program_without_a_greeting_is_a_lost_node(tmp_path: Path) -> None:
    """In time, and its pipe is closed."""
    transport = ChildTransport([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises((NodeLost, NodeStateUnknown)):
        RemoteNodes(Boxes(str(tmp_path)), transport).node_proxy("box-0", seconds=0.3)
    assert transport.pipes[0].child.wait(SECONDS) < 0
    transport.reap()


def test_bandwidth_between_two_nodes_is_measured_by_sending(nodes: RemoteNodes) -> None:
    """Over a real connection, and for no longer than requested."""
    assert nodes.bandwidth("box-0", "box-1", 0.05) > 0


def test_the_event_log_of_an_agent_that_exited_is_read_through_the_proxy(nodes: RemoteNodes) -> None:
    """Only the events of the requested job."""
    nodes.survey()
    folder = nodes.folder("box-0")
    folder.mkdir(parents=True)
    event_log = EventLog(folder / EVENT_LOG)
    event_log.begin_job("job")
    event_log.add({"event": "steps", "generation": 1, "steps": [[5, 1.0, 0.1, 0.5]]}, milestone=False)
    (event,) = nodes.recent_events("box-0", "job")
    assert event["steps"] == [[5, 1.0, 0.1, 0.5]]
    assert nodes.recent_events("box-0", "another") == []
    assert nodes.recent_events("box-1", "job") == []
