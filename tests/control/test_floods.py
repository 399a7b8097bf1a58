"""A node that tells more than anybody could take in: what a flow keeps and writes of it has bounds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.agent.event_log import LARGEST
from holdfast.control.agents import event_queue
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.event_queue import EventQueue
from holdfast.control.faults import event_budget
from holdfast.control.faults.event_budget import BoundedDict, NodeEventBudget
from holdfast.control.supervisor import event_handlers
from holdfast.control.supervisor.reattach import token_of_members
from holdfast.history import queries
from holdfast.protocol import LineBuffer, encode
from tests.control.bare_controller import bare_controller
from tests.control.test_hearing import MEMBERSHIP, Told
from tests.waiting import wait_until

EVENTS = 20_000


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    """Give a hearing of a job in its first generation."""
    with bare_controller(tmp_path, MEMBERSHIP) as controller:
        yield Told(controller)


class Flooding:
    """An agent that tells all its events at once to whoever attaches, as one does whose journal is long."""

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
                            sock.sendall(encode({"seq": number, "event": "storage_error", "padding": "x" * 100}))


def test_what_waits_of_one_node_is_bounded_and_nothing_of_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends where nobody takes in what comes over it, and what was missed is told again once somebody does."""
    monkeypatch.setattr(event_queue, "MOST", 2**19)
    monkeypatch.setattr("holdfast.control.agents.reactor.CHUNK", 2**14)
    waiting, agent = EventQueue(), Flooding()
    client = AgentClient("a", agent.connect, waiting, epoch=1)
    client.send("attach", lambda _: None, since=0)
    client.agent, client._told = "x", 0
    wait_until(lambda: client.disconnected_since is not None, seconds=60)
    heard = [event["seq"] for _, event in waiting.drain(0.0)]
    assert len(heard) * 100 < event_queue.MOST < EVENTS * 100
    while len(heard) < EVENTS:
        heard += [event["seq"] for _, event in waiting.drain(1.0)]
    assert heard == list(range(1, EVENTS + 1))
    assert agent.connections > 1
    client.close()
    agent.join()


def test_a_node_that_tells_of_ever_new_troubles_fills_no_history(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once; of other nodes all is on record, and of this one more after a while."""
    now = [1000.0]
    monkeypatch.setattr(event_budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(event_handlers, "REMEMBERED", 100)
    told.hearing._rows._most = at_once = 2000

    def storage_error(number: int, node: str) -> None:
        told.hears("storage_error", node=node, kind="checkpoint-damaged", path=f"/c/{number}", step=number, why="w")

    for number in range(at_once + 5000):
        storage_error(number, "a")
    storage_error(10**6, "b")
    assert told.recorder.flush(60.0)
    rows = queries.checkpoints(told.history, told.job.id)
    assert len(rows) == at_once + 1
    assert len([one for one in told.job_events if "the agent of a tells more faults, checkpoints and events" in one]) == 1
    assert len(told.run.generations.state.problems) <= 100
    now[0] += 60.0
    for number in range(event_budget.ROWS * 2):
        storage_error(10**7 + number, "a")
    assert told.recorder.flush(60.0)
    assert len(queries.checkpoints(told.history, told.job.id)) == len(rows) + event_budget.ROWS
    assert len([one for one in told.job_events if "the agent of a tells more" in one]) == 1


def test_steps_are_recorded_up_to_a_budget_of_their_own(told: Told) -> None:
    """A journal of days is within it; steps that no training makes so fast are not."""
    told.hearing._steps = NodeEventBudget("steps", 60, 1000, told.run.log.record_event)
    told.steps(*((step, 0.5) for step in range(1, 3001)))
    assert 1000 <= len(told.curve()) <= 1010
    assert any("more steps than" in one for one in told.job_events)
    assert event_budget.STEPS_AT_ONCE * 30 > 2 * LARGEST, "a step takes that many bytes of a journal at least, of which there are two files"


def test_only_the_newest_keys_are_kept() -> None:
    """One that is set again does not count twice."""
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
    """What was kept here stays as long as any member knows it; on another host more than half of them decide."""
    assert token_of_members(kept, given) == used
