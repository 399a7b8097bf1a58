"""The lease of an agent: whichever command reached it in time renews it, on a clock of the test's own."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.agent import server
from holdfast.agent.node.identity import Identity
from holdfast.agent.server import AgentServer
from holdfast.agent.workers import group
from holdfast.protocol import LineBuffer, connect, encode

LEASE = 60.0


class Timed:
    """An agent in the test's process that serves a job, and a controller's connection to it."""

    def __init__(self, folder: Path, clock: list[float]) -> None:
        self._clock = clock
        self.agent = AgentServer(Identity(directory=folder, node="n", cluster="c", id="i"), kernel_log=Path(os.devnull), root=folder)
        self.agent._server.setblocking(False)
        self.agent._selector.register(self.agent._server, selectors.EVENT_READ, lambda _: self.agent._accept())
        self.agent.accept_job("job", 1, LEASE)
        self.agent.renew()
        self.controller = connect(self.agent.me.socket, seconds=60)
        self._lines = LineBuffer()
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        """Let so many *seconds* pass, and the agent take its turn."""
        self._clock[0] += seconds
        self.agent._turn()

    def ping(self) -> None:
        """Send a command."""
        self.controller.sendall(encode({"id": 1, "do": "ping", "job": "job", "epoch": 1}))

    def is_answered(self) -> bool:
        """Return whether the command was carried out."""
        (answer,) = self._lines.feed(self.controller.recv(4096))
        return bool(answer["ok"])

    def close(self) -> None:
        """Close what is open."""
        self.controller.close()
        self.agent._turn()  # it sees that, and closes its end
        self.agent._server.close()
        self.agent._selector.close()


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """Give an agent whose lease has just begun."""
    clock = [1000.0]
    monkeypatch.setattr(group, "children_of", lambda _: [])  # an agent ends all its children; those of this process are other tests' own
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    made = Timed(tmp_path, clock)
    yield made
    made.close()


def test_a_command_renews_the_lease_and_without_one_it_ends(timed: Timed) -> None:
    """Each for as long as the first."""
    for _ in range(3):
        timed.ping()
        timed.turn(LEASE - 1)
        assert timed.is_answered()
        assert not timed.agent.ending
    timed.turn(LEASE - 1)
    assert not timed.agent.ending
    timed.turn(2)
    assert timed.agent.ending


def test_a_command_that_came_while_the_agent_was_stopped_renews_the_lease(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that continues after a stop leaves `select` without what has come, once the time of that call is over."""
    select, returned = timed.agent._selector.select, list[str]()

    def after_a_stop(seconds: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not returned:
            returned.append("nothing")
            return []
        return select(seconds)

    monkeypatch.setattr(timed.agent._selector, "select", after_a_stop)
    timed.ping()
    timed.turn(LEASE + 100)
    assert returned
    assert timed.is_answered()
    assert not timed.agent.ending
