"""Limits on what one node may send: what a controller keeps and records of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.agent.event_log import MAX_BYTES
from holdfast.control.agents import reactor
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.reactor import EventQueue
from holdfast.control.faults import job_faults, node_faults
from holdfast.control.faults.node_faults import BoundedDict, NodeEventBudget
from holdfast.control.supervisor.reattach import token_of_members
from holdfast.history import queries
from holdfast.protocol import LineBuffer, encode
from tests.control.bare_controller import bare_controller
from tests.control.test_event_handlers import MEMBERSHIP, Recorded
from tests.mentions import mentions
from tests.waiting import wait_until

EVENTS = 20_000


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    """Return the controller of a job in its first generation."""
    with bare_controller(tmp_path, MEMBERSHIP) as controller:
        yield Recorded(controller)


class Flooding:
    """An agent that sends all its events at once to whoever attaches, as one with a long event log does."""

    def __init__(self) -> None:
        self.connections = 0
        self._threads: list[threading.Thread] = []

    def connect(self) -> socket.socket:
        """Return a new connection to it."""
        ours, theirs = socket.socketpair()
        self.connections += 1
        self._threads.append(threading.Thread(target=self._serve, args=(theirs,)))
        self._threads[-1].start()
        return ours

    def join(self) -> None:
        """Wait until nobody is served any more."""
        for thread in self._threads:
            thread.join()

    def _serve(self, sock: socket.socket) -> None:
        lines = LineBuffer()
        with sock, suppress(OSError):
            while data := sock.recv(4096):
                for order in lines.feed(data):
                    sock.sendall(encode({"re": order["id"], "ok": True, "agent": "x", "since": order.get("since", 0)}))
                    if order["do"] == "attach":
                        for number in range(order["since"] + 1, EVENTS + 1):
                            sock.sendall(encode({"seq": number, "event": "storage-error", "padding": "x" * 100}))


def test_the_waiting_events_of_one_node_are_bounded_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends while nobody handles its events, and the agent replays what was missed."""
    monkeypatch.setattr(reactor, "MAX_BYTES", 2**19)
    monkeypatch.setattr("holdfast.control.agents.reactor.CHUNK", 2**14)
    waiting, agent = EventQueue(), Flooding()
    client = AgentClient("a", agent.connect, waiting, epoch=1)
    client.agent, client._last_event = "x", 0
    client.send("attach", lambda _: None, since=0)
    wait_until(lambda: client.disconnected_since is not None, seconds=60)
    received = [event["seq"] for _, event in waiting.drain(0.0)]
    assert len(received) * 100 < reactor.MAX_BYTES < EVENTS * 100
    while len(received) < EVENTS:
        received += [event["seq"] for _, event in waiting.drain(1.0)]
    assert received == list(range(1, EVENTS + 1))
    assert agent.connections > 1
    client.close()
    agent.join()


def test_a_node_that_reports_endless_problems_does_not_fill_the_history(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is reported once; other nodes are recorded completely, and this one again after a while."""
    now = [1000.0]
    monkeypatch.setattr(node_faults, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(job_faults, "REMEMBERED", 100)
    recorded.handlers._rows._most = at_once = 2000

    def storage_error(number: int, node: str) -> None:
        recorded.receives("storage-error", node=node, kind="checkpoint-damaged", path=f"/c/{number}", step=number, why="w")

    for number in range(at_once + 5000):
        storage_error(number, "a")
    storage_error(10**6, "b")
    assert recorded.recorder.flush(60.0)
    rows = queries.checkpoints(recorded.history, recorded.job.id)
    assert len(rows) == at_once + 1
    assert len([one for one in recorded.job_events if mentions(one, "agent of a")]) == 1
    assert len(recorded.run.generations.state.problems) <= 100
    now[0] += 60.0
    for number in range(node_faults.ROWS * 2):
        storage_error(10**7 + number, "a")
    assert recorded.recorder.flush(60.0)
    assert len(queries.checkpoints(recorded.history, recorded.job.id)) == len(rows) + node_faults.ROWS
    assert len([one for one in recorded.job_events if mentions(one, "agent of a")]) == 1


def test_steps_have_a_budget_of_their_own(recorded: Recorded) -> None:
    """An event log of days is within it; faster steps than any training makes are not."""
    recorded.handlers._steps = NodeEventBudget("steps", 60, 1000, recorded.run.log.record_event)
    recorded.steps(*((step, 0.5) for step in range(1, 3001)))
    assert 1000 <= len(recorded.curve()) <= 1010
    assert any("more steps than" in one for one in recorded.job_events)
    assert node_faults.STEPS_AT_ONCE * 30 > 2 * MAX_BYTES, (
        "a step takes that many bytes of an event log at least, of which there are two files"
    )


def test_only_the_newest_keys_are_kept() -> None:
    """A key that is set again counts once."""
    kept = BoundedDict[int, None](3)
    for number in (1, 2, 2, 3, 4):
        kept[number] = None
    assert list(kept) == [2, 3, 4]


@pytest.mark.parametrize(
    ("kept", "given", "used"),
    [
        ("k", [], "k"),
        ("k", ["evil", "k", "evil"], "k"),
        ("new", ["true", "true", "evil"], "true"),
        ("new", ["evil", "true", "true"], "true"),
        ("new", ["true"], "true"),
        ("new", ["evil", "true"], "new"),
        ("new", ["evil", "worse", "true"], "new"),
    ],
)
def test_no_single_node_chooses_the_jobs_secret(kept: str, given: list[str], used: str) -> None:
    """The one kept here stays as long as any member knows it; on another host more than half of them decide."""
    assert token_of_members(kept, given) == used
