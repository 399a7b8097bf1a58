"""Until when a controller knows what an agent had to report: after a silence, old events arrive first."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from holdfast.control.agents import client as clients
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.reactor import EventQueue, Item
from holdfast.protocol import LineBuffer, Message, encode
from tests.waiting import wait_until

GAP = 0.3
"""Seconds of silence after which what arrives may be old."""
NEVER = 3600.0
"""The same where the test makes no silence: a busy machine makes its own."""


class Held:
    """An agent whose answers and events leave it only when the test says so, as over a network that is cut for a while."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def connect(self) -> socket.socket:
        """Return a new connection to it."""
        ours, theirs = socket.socketpair()
        self._sockets.append(theirs)
        self._threads.append(threading.Thread(target=self._read, args=(theirs,), daemon=True))
        self._threads[-1].start()
        return ours

    def say(self, message: Message) -> None:
        """Have *message* arrive."""
        self._sockets[-1].sendall(encode(message))

    def answer(self, command: str, since: int = 0) -> None:
        """Have the answer to the oldest unanswered *command* arrive; wait for that command."""
        while (order := self.commands.get(timeout=60))["do"] != command:
            pass
        self.say({"re": order["id"], "ok": True, "agent": "x", "since": since})

    def break_off(self) -> None:
        """End the connection."""
        self._sockets[-1].shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until nobody is served any more."""
        for thread in self._threads:
            thread.join()

    def _read(self, sock: socket.socket) -> None:
        lines = LineBuffer()
        with sock, suppress(OSError):
            while data := sock.recv(4096):
                for order in lines.feed(data):
                    if order["do"] == "about":  # who reconnects asks first who is there
                        sock.sendall(encode({"re": order["id"], "ok": True, "agent": "x"}))
                    else:
                        self.commands.put(order)


@pytest.fixture
def agent() -> Held:
    """Return an agent."""
    return Held()


@pytest.fixture
def client(agent: Held) -> Iterator[AgentClient]:
    """Return a client of it that was silent for longer than the gap, and has just received an old event."""
    client = AgentClient("a", agent.connect, EventQueue(), epoch=1)
    client.gap, client.agent, client._last_event = NEVER, "x", 0
    agent.say({"event": "steps", "seq": 1})
    wait_until(lambda: client._last_event == 1, seconds=60)
    assert client.catching_up is None
    assert client.known_until == client.last_received
    client.gap = GAP
    time.sleep(2 * GAP)
    agent.say({"event": "steps", "seq": 2})
    wait_until(lambda: client.catching_up is not None, seconds=60)
    client.gap = NEVER
    yield client
    client.close()
    agent.join()


def test_what_arrives_after_a_silence_is_known_to_be_complete_once_a_ping_from_after_it_is_answered(
    agent: Held, client: AgentClient
) -> None:
    """The stream keeps its order: whatever the agent said before its answer has arrived then."""
    before = client.known_until
    assert client.last_received - before > GAP
    agent.say({"event": "steps", "seq": 3})
    wait_until(lambda: client._last_event == 3, seconds=60)
    assert client.known_until == before, "it may be as old as the silence"
    asked = time.monotonic()
    for _ in range(5):
        client.ping()
    assert agent.commands.qsize() <= 1, "one is enough"
    agent.answer("ping")
    wait_until(lambda: client.catching_up is None, seconds=60)
    assert asked <= client.known_until <= client.last_received
    agent.say({"event": "steps", "seq": 4})
    wait_until(lambda: client._last_event == 4, seconds=60)
    assert client.known_until == client.last_received > asked


def test_a_ping_from_the_silence_tells_only_of_the_time_until_then(agent: Held, client: AgentClient) -> None:
    """It may have lain in the network as long as the events did."""
    client.catching_up = time.monotonic() + 3600.0  # the silence ended later than the ping was sent
    asked = time.monotonic()
    client.ping()
    agent.answer("ping")
    wait_until(lambda: client.known_until >= asked, seconds=60)
    assert client.catching_up is not None
    client.ping()
    agent.answer("ping")  # the next one is sent


def test_a_new_connection_is_behind_until_its_events_were_replayed(agent: Held, client: AgentClient) -> None:
    """Its first answer comes before them."""
    client.ping()
    agent.answer("ping")
    wait_until(lambda: client.catching_up is None, seconds=60)
    known = client.known_until
    agent.break_off()
    wait_until(lambda: client.disconnected_since is None and client.catching_up is not None, seconds=60)
    assert client.known_until == known < client.last_received
    client.ping()
    agent.answer("ping")
    wait_until(lambda: client.catching_up is None, seconds=60)
    assert client.known_until > known


def test_an_answer_that_is_here_before_the_ping_has_returned_does_not_keep_the_next_silence_from_ending(
    agent: Held, client: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the thread that sends it has to wait for a processor: the reactor handles the answer meanwhile."""
    send = client.send

    def late(command: str, callback: Callable[[Message], None], **facts: object) -> int:
        number = send(command, callback, **facts)
        agent.answer(command)
        wait_until(lambda: number not in client._unanswered and client.catching_up is None, seconds=60)
        return number

    monkeypatch.setattr(client, "send", late)
    client.ping()
    monkeypatch.undo()
    client.last_received -= 2 * NEVER  # it falls silent again
    agent.say({"event": "steps", "seq": 3})
    wait_until(lambda: client.catching_up is not None, seconds=60)
    client.ping()
    agent.answer("ping")
    wait_until(lambda: client.catching_up is None, seconds=60)


def test_a_command_that_is_given_up_while_the_connection_is_restored_does_not_end_that(agent: Held, client: AgentClient) -> None:
    """Whoever waited for its answer forgets it in another thread, just when all commands are sent again."""

    class GivenUp(dict[int, bytes]):
        """Commands one of which is forgotten as soon as somebody has begun to go through them."""

        def __iter__(self) -> Iterator[int]:
            numbers = list(super().__iter__())
            self.pop(77, None)
            return iter(numbers)

    client._unanswered = GivenUp({77: encode({"id": 77, "do": "ping"}), 78: encode({"id": 78, "do": "stop"})})
    agent.break_off()
    agent.answer("stop")
    wait_until(lambda: client.disconnected_since is None and 78 not in client._unanswered, seconds=60)


def test_an_event_that_arrives_while_its_client_attaches_is_counted(agent: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one after which the agent continues over the next connection, else that event would come twice."""
    event_queue, received = EventQueue(), threading.Event()
    put = event_queue.put

    def note_put(item: Item) -> None:
        put(item)
        received.set()

    def compute_slowly(one: float, other: float) -> float:
        """Return the greater one, as `max` does; of numbers of events, once a newer event is counted, or has had time for it."""
        if isinstance(one, int):
            agent.say({"event": "steps", "seq": 6})
            received.wait(0.5)
        return max(one, other)

    monkeypatch.setattr(event_queue, "put", note_put)
    monkeypatch.setattr(clients, "max", compute_slowly, raising=False)
    client = AgentClient("a", agent.connect, event_queue, epoch=1)
    with closing(client), ThreadPoolExecutor(1) as threads:
        attached = threads.submit(client.attach, since=5)
        agent.answer("attach", since=5)
        agent.answer("ping")
        attached.result(60)
        assert received.wait(60)
        wait_until(lambda: client._last_event == 6, seconds=60)
    agent.join()
