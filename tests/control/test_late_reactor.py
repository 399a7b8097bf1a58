"""Answers that have arrived and were not handled yet are in time, however late the thread that handles them gets a processor."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from holdfast.control.agents.client import AgentClient, Broadcast
from holdfast.control.agents.reactor import REACTOR, EventQueue, Reactor
from holdfast.protocol import LineBuffer, encode
from tests.waiting import wait_until


def test_a_reactor_whose_thread_has_not_run_yet_has_not_caught_up() -> None:
    """Whoever was stopped with it may continue first."""
    ours, theirs = socket.socketpair()
    reactor = Reactor()
    reactor._thread = threading.current_thread()  # one that does not read
    with closing(ours), closing(theirs):
        reactor.add(ours, lambda _: None, lambda _: None)
        before = time.monotonic()
        assert reactor.caught_up >= before
        theirs.send(b"x")
        assert reactor.caught_up < before


class Blocked:
    """An agent that answers at once, to a process whose reactor is held up until somebody frees it."""

    def __init__(self) -> None:
        self.free, self.is_held = threading.Event(), threading.Event()
        self._ours, self._theirs = socket.socketpair()
        self._sockets: list[socket.socket] = [self._ours, self._theirs]
        self._held = REACTOR.add(self._ours, self._hold, lambda _: None)

    def _hold(self, _data: bytes) -> None:
        self.is_held.set()
        self.free.wait(60)

    def hold_up(self, seconds: float) -> None:
        """Hold the reactor up for so long, from now on."""
        self._theirs.send(b"x")
        assert self.is_held.wait(60)
        threading.Timer(seconds, self.free.set).start()

    def connect(self) -> socket.socket:
        """Return a new connection to the agent."""
        ours, theirs = socket.socketpair()
        self._sockets += [ours, theirs]
        threading.Thread(target=self._serve, args=(theirs,), daemon=True).start()
        return ours

    @staticmethod
    def _serve(sock: socket.socket) -> None:
        lines = LineBuffer()
        with suppress(OSError):
            while data := sock.recv(4096):
                for order in lines.feed(data):
                    sock.sendall(encode({"re": order["id"], "ok": True}))

    def close(self) -> None:
        """Let the reactor go on, and close all."""
        self.free.set()
        REACTOR.drop(self._held)
        for one in self._sockets:
            one.close()


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    """Give such an agent."""
    made = Blocked()
    yield made
    made.close()


def test_a_command_is_answered_though_the_answer_is_handled_after_its_time(blocked: Blocked) -> None:
    """By one agent, and by several; and a node that sent something is not silent."""
    client = AgentClient("a", blocked.connect, EventQueue(), epoch=1)
    with closing(client):
        blocked.hold_up(0.5)
        assert client.send_command("ping", seconds=0.05)["ok"] is True

        blocked.free.clear()
        blocked.is_held.clear()
        blocked.hold_up(0.5)
        broadcast = Broadcast("ping", 0.05, 1)
        broadcast.send(client, {})
        assert broadcast.wait(["a"]) == {"a": {"re": 2, "ok": True}}

        blocked.free.clear()
        blocked.is_held.clear()
        blocked.hold_up(0.5)
        before = time.monotonic()
        client.ping()
        assert client.receives_within(before, 0.05)
        wait_until(lambda: client.last_received > before, seconds=60)
