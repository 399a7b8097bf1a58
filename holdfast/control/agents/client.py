"""The flow's end of a connection to one agent: orders out, answers and events in.

A connection is not the agent: one that ends is sought anew, the events that were missed are told again out of the agent's journal, and
orders that nobody has answered are given again under the number that they had, by which the agent knows those that it has carried out.
The agent is gone only when its node says that nobody listens, or that another one does.
"""

from __future__ import annotations

import logging
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from holdfast.control.agents.answers import complaint
from holdfast.control.agents.event_queue import EventQueue
from holdfast.control.agents.reactor import REACTOR
from holdfast.errors import AgentDisconnected, CommandRejected, LeaseLost, NodeLost, ProtocolMismatch
from holdfast.log import note
from holdfast.protocol import PROTOCOL, BadLine, LineBuffer, Message, encode

log = logging.getLogger("holdfast.control")

LATEST: Final = 2**62
"""A sequence number that no event has yet."""
PATIENCE: Final = 3.0
"""Seconds without a connection for which orders wait for the next one: longer, and whoever gives one hears at once that nobody takes it."""
PAUSES: Final = (0.0, 0.05, 0.2, 0.5, 1.0)
"""Seconds before each attempt at a new connection; the last one is repeated."""
FULL: Final = 0.1
"""Seconds between two looks whether what a node has told was taken in, so that it may tell more."""
GREET_SECONDS: Final = 5.0
"""How long an agent may take to say who it is."""


class Disconnection(OSError):
    """There is no connection now, and it is not known why."""


class AgentClient:
    """One agent. Its events go to *inbox* with the node's name; its end is an event too.

    Raise `AgentDisconnected` when none listens on the node, `NodeLost` when the node does not answer in time, `ProtocolMismatch` when
    the agent there has another protocol.
    """

    def __init__(
        self, node: str, connect: Callable[[], socket.socket], event_queue: EventQueue, *, epoch: int, job: str | None = None
    ) -> None:
        self.node, self.epoch, self.job = node, epoch, job
        self.heard = self.spoke = time.monotonic()
        """When the agent was last heard, and when it was last given an order."""
        self.gone: str | None = None
        self.gone_at: float | None = None
        self.disconnected_since: float | None = None
        """Since when there has been no connection (monotonic); None while there is one."""
        self.superseded = 0
        """Epoch of a newer flow, once the agent has refused an order in its favour."""
        self.missed = 0
        """Attempts at a new connection that failed since the last one ended."""
        self._connect, self._event_queue = connect, event_queue
        self._session = secrets.token_hex(8)
        self.agent: str | None = None
        """Which agent this is, once it has said so: only that one is sought when the connection ends."""
        self._told: int | None = None
        """Number of the newest event that was heard, once events are told."""
        self._answers: dict[int, Callable[[Message], None]] = {}
        self._unanswered: dict[int, bytes] = {}
        """Orders that are given again over the next connection."""
        self._number = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        try:
            self._socket = connect()
        except TimeoutError as error:
            raise NodeLost(node, str(error)) from error
        except OSError as error:
            raise AgentDisconnected(node, str(error)) from error
        self._socket.settimeout(None)
        self._lines = LineBuffer()
        self._listened = REACTOR.add(self._socket, self._hear, self._ended)

    def about(self) -> Message:
        """Return what the agent says of itself: its job, generation, membership and workers."""
        told = self.send_command("about", protocol=PROTOCOL)
        self.agent = told.get("agent")
        return told

    def attach(self, *, since: int = LATEST) -> None:
        """Have the agent tell its events from now on, those after *since* first; return when the first ones are in the inbox."""
        told = self.send_command("attach", since=since, protocol=PROTOCOL)
        self.agent = told["agent"]
        self._told = max(int(told["since"]), self._told or 0)  # some of them may have come already
        self.send_command("ping")  # answered after the events of the past: one stream keeps its order

    @property
    def away(self) -> bool:
        """Tell whether there has been no connection for so long that orders do not wait for the next one."""
        since = self.disconnected_since
        return since is not None and time.monotonic() - since > PATIENCE

    def send_command(self, verb: str, *, seconds: float = 10.0, **facts: object) -> Message:
        """Give an order and wait for its answer; raise `CommandRejected` when it is no, `AgentDisconnected` when none comes.

        Raise `LeaseLost` when the agent says that a newer flow steers the job.
        """
        answers = queue.SimpleQueue[Message]()
        number = self.send(verb, answers.put, **facts)
        try:
            return self.judged(verb, self._answer(answers, time.monotonic() + seconds))
        except queue.Empty:
            raise self.silence(verb, seconds) from None
        finally:
            self.forget(number)

    def judged(self, verb: str, answer: Message) -> Message:
        """Return the answer to an order; raise `CommandRejected` when it is no, `AgentDisconnected` when it is the agent's end."""
        if answer.get("event") == "agent.disconnected":
            raise AgentDisconnected(self.node, str(answer.get("why")))
        if answer.get("ok") is not True:
            if self.superseded:
                raise LeaseLost(self.job or "", f"a newer flow (epoch {self.superseded})")
            raise CommandRejected(self.node, verb, str(answer.get("why", "it gave no reason")))
        if why := complaint(verb, answer):
            raise CommandRejected(self.node, verb, f"what its agent answers makes no sense: {why}")
        return answer

    def silence(self, verb: str, seconds: float) -> AgentDisconnected:
        """Return the error that no answer to an order came in so many *seconds*."""
        missing = (
            "its connection is being sought" if self.disconnected_since is not None else f"no answer to '{verb}' within {seconds:.0f} s"
        )
        return AgentDisconnected(self.node, missing)

    def _answer(self, answers: queue.SimpleQueue[Message], until: float) -> Message:
        """Wait for an answer; raise ``queue.Empty`` when there is none by *until*, or no connection for too long."""
        while (left := until - time.monotonic()) > 0 and not self.away:
            with suppress(queue.Empty):
                return answers.get(timeout=left if left < PATIENCE else PATIENCE / 4)
        return answers.get_nowait()

    def send(self, verb: str, take: Callable[[Message], None], **facts: object) -> int:
        """Give an order without waiting; return its number. *take* is called with the answer, or with the agent's end."""
        with self._lock:
            self._number, self.spoke = self._number + 1, time.monotonic()
            number = self._number
            if self.gone:
                raise AgentDisconnected(self.node, self.gone)
            if self.away:
                raise AgentDisconnected(self.node, "its connection is being sought")
            facts = {"id": number, "do": verb, "epoch": self.epoch, "job": self.job, "session": self._session, **facts}
            line = encode(facts)
            self._answers[number] = take
            self._unanswered[number] = line
            if self.disconnected_since is None:
                with suppress(OSError):  # the listener sees the end as well, and it is given again
                    self._socket.sendall(line)
        return number

    def forget(self, number: int) -> None:
        """Wait for the answer to this order no more, and do not give it again."""
        self._answers.pop(number, None)
        self._unanswered.pop(number, None)

    def takes(self) -> bool:
        """Tell whether an order can be sent now without waiting until the agent has read the ones before."""
        if self.disconnected_since is not None:
            return True  # it is kept for the next connection
        writable = select.poll()
        try:
            writable.register(self._socket, select.POLLOUT)
        except (OSError, ValueError):  # closed meanwhile
            return True
        return bool(writable.poll(0))

    def ping(self) -> None:
        """Show the agent that somebody is here; its answer shows the same of the agent."""
        if self.disconnected_since is None:
            with suppress(AgentDisconnected):
                self.forget(self.send("ping", lambda _: None))

    def speaks(self, since: float, seconds: float) -> bool:
        """Tell whether anything is heard after *since* (monotonic), for which it is waited so many seconds."""
        until = time.monotonic() + seconds
        while not self.gone and time.monotonic() < until:
            if self.heard > since and self.disconnected_since is None:
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """End the connection without calling that a fault."""
        self._closed.set()
        with self._lock:
            sock, listened = self._socket, self._listened
        if REACTOR.drop(listened):
            self._end("its connection was closed")
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    # -- listening ----------------------------------------------------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        self.heard = time.monotonic()
        if not self._event_queue.has_room(self.node, len(data)):  # what it tells is told again once there is
            raise OSError("it tells more than is taken in of one node")
        for message in self._lines.feed(data):
            self._take(message)

    def _ended(self, error: OSError | None) -> None:
        """Seek the agent anew, beside the thread that hears all others."""
        why = "its connection ended" + (f" ({error})" if error is not None else "")
        if self._closed.is_set():
            self._end(why)
            return
        self._socket.close()
        self.disconnected_since, self.missed = time.monotonic(), 0
        threading.Thread(target=self._seek, args=(why,), name=f"seek-{self.node}", daemon=True).start()

    def _seek(self, why: str) -> None:
        try:
            lines = self._come_back()
        except OSError as error:
            self._end(f"{why}; {error}" if str(error) else why)
            return
        with self._lock:
            self._lines = lines
            self._listened = REACTOR.add(self._socket, self._hear, self._ended)
            listened = self._listened
        if self._closed.is_set() and REACTOR.drop(listened):  # in between
            self._socket.close()
            self._end(why)

    def _come_back(self) -> LineBuffer:
        """Connect anew to the very agent, for as long as nobody knows that it is gone; raise ``OSError`` once that is known."""
        for pause in _pauses():
            self._wait_for_room()
            if self._closed.wait(pause):
                raise OSError
            try:
                sock = self._connect()
            except (TimeoutError, ProtocolMismatch) as error:
                if not self.missed:
                    note(log, "agent.away", node=self.node, why=error)
                self.missed += 1
                continue
            except OSError as error:
                raise OSError(f"nobody listens there ({error})") from error
            try:
                return self._greet(sock)
            except Disconnection:
                self.missed += 1
                sock.close()
        raise AssertionError

    def _wait_for_room(self) -> None:
        """Wait until what the agent has told already was taken in, or this connection is closed."""
        while not self._event_queue.has_room(self.node) and not self._closed.wait(FULL):
            pass

    def _greet(self, sock: socket.socket) -> LineBuffer:
        """See who listens at *sock*, and take up where the connection before ended; raise `Disconnection` when that cannot be."""
        if self.agent is None:
            sock.close()
            raise OSError
        lines = LineBuffer()
        try:
            sock.settimeout(GREET_SECONDS)
            sock.sendall(encode({"id": 0, "do": "about", "protocol": PROTOCOL, "epoch": self.epoch, "job": self.job}))
            first: list[Message] = []
            while not first:
                if not (data := sock.recv(262144)):
                    raise Disconnection("it hung up")
                first = list(lines.feed(data))
            sock.settimeout(None)
        except (OSError, BadLine) as error:
            raise Disconnection(str(error)) from error
        if first[0].get("agent") != self.agent:
            sock.close()
            raise OSError("another agent serves there now")
        with self._lock:
            self._socket, self.disconnected_since, self.heard = sock, None, time.monotonic()
            waiting = [self._unanswered[number] for number in sorted(self._unanswered)]
            with suppress(OSError):  # the listener sees the end
                if self._told is not None:
                    known = {"since": self._told, "protocol": PROTOCOL, "epoch": self.epoch, "job": self.job}
                    sock.sendall(encode({"id": 0, "do": "attach", **known}))
                sock.sendall(b"".join(waiting))
        note(log, "agent.back", node=self.node, since=self._told, again=len(waiting))
        return lines

    def _end(self, why: str) -> None:
        away = 0.0 if self.disconnected_since is None else time.monotonic() - self.disconnected_since
        self.gone_at, self.gone = time.time() - away, why
        message = {"event": "agent.disconnected", "why": why, "at": self.gone_at}
        for take in list(self._answers.values()):
            take(message)
        if not self._closed.is_set():
            note(log, "agent.disconnected", node=self.node, why=why)
            self._event_queue.put((self.node, message))

    def _take(self, message: Message) -> None:
        if "event" in message:
            number = message.get("seq")
            if number is not None:
                if self._told is not None and number <= self._told:
                    return  # heard before the connection ended
                self._told = number
            self._event_queue.put((self.node, message))
            return
        if not message.get("ok") and isinstance(newer := message.get("epoch"), int) and newer > self.epoch:
            self.superseded = newer
        number = message.get("re")
        if not isinstance(number, int):  # an answer to nothing that was asked
            return
        self._unanswered.pop(number, None)
        take = self._answers.get(number)
        if take is not None:
            take(message)


def _pauses() -> Iterator[float]:
    yield from PAUSES
    while True:
        yield PAUSES[-1]
