"""The controller's end of the connection to one agent: commands out, answers and events in; and one command sent to many agents.

A connection that ends does not end the agent: the client reconnects, the agent replays the events since the last one received, and the
client sends unanswered commands again under their numbers, so the agent recognizes those that it has carried out already. The agent is
lost only when its node reports that nothing listens, or that another agent does.
"""

from __future__ import annotations

import logging
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from holdfast.control.agents.reactor import REACTOR, EventQueue
from holdfast.control.agents.schema import answer_error
from holdfast.errors import AgentDisconnected, CommandRejected, LeaseLost, NodeLost, ProtocolMismatch, WorldError
from holdfast.log import note
from holdfast.protocol import HEARTBEAT_INTERVAL, PROTOCOL, BadLine, LineBuffer, Message, encode

log = logging.getLogger("holdfast.control")

LATEST: Final = 2**62
"""A sequence number beyond that of any event."""
PATIENCE: Final = 3.0
"""Seconds without a connection for which commands wait for the next one; after that they fail at once."""
RECONNECT_DELAYS: Final = (0.0, 0.05, 0.2, 0.5, 1.0)
"""Seconds before each attempt to reconnect; the last value repeats."""
ROOM_CHECK: Final = 0.1
"""Seconds between two checks whether the event queue has room for more events of a node."""
GREET_SECONDS: Final = 5.0
"""How long an agent may take to identify itself."""
LAG_SECONDS: Final = 10.0
"""How long after its deadline an answer is waited for that has arrived and was not handled yet."""


class Disconnection(OSError):
    """The connection attempt failed for a reason that says nothing about the agent."""


class AgentClient:
    """The connection to one agent. Events go to the event queue with the node's name; the loss of the agent is an event too.

    Raise `AgentDisconnected` when no agent listens on the node, `NodeLost` when the node does not answer in time, `ProtocolMismatch` when
    what listens speaks another protocol.
    """

    def __init__(
        self, node: str, connect: Callable[[], socket.socket], event_queue: EventQueue, *, epoch: int, job: str | None = None
    ) -> None:
        self.node, self.epoch, self.job = node, epoch, job
        self.last_received = self.last_sent = self.known_until = time.monotonic()
        """*known_until*: all that the agent had to report until then has arrived. After a silence old events come first."""
        self.gap = 4 * HEARTBEAT_INTERVAL
        """Seconds of silence after which what arrives may be old."""
        self.catching_up: float | None = None
        """Since when events from before may still arrive (monotonic); None while none do."""
        self._probing, self._probe = False, 0
        """Whether a ping is on its way whose answer comes after them, and the number of the last one."""
        self.lost_reason: str | None = None
        """Why the agent is lost; None as long as it is not."""
        self.lost_at: float | None = None
        self.disconnected_since: float | None = None
        """When the connection ended (monotonic); None while there is one."""
        self.superseded = 0
        """Epoch of a newer controller, once the agent has rejected a command in its favour."""
        self.failed_attempts = 0
        """Failed attempts to reconnect since the last connection ended."""
        self.agent: str | None = None
        """Id of the agent, once known: the client reconnects to this agent only."""
        self._connect, self._event_queue = connect, event_queue
        self._session = secrets.token_hex(8)
        self._last_event: int | None = None
        """Number of the newest event received, once attached."""
        self._callbacks: dict[int, Callable[[Message], None]] = {}
        self._unanswered: dict[int, bytes] = {}
        """Commands to send again over the next connection."""
        self._number = 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._numbering = threading.Lock()  # held while `_last_event` changes: whoever attaches and the reactor change it
        try:
            self._socket = connect()
        except TimeoutError as error:
            raise NodeLost(node, str(error)) from error
        except OSError as error:
            raise AgentDisconnected(node, str(error)) from error
        self._socket.settimeout(None)
        self._lines = LineBuffer()
        self._registration = REACTOR.add(self._socket, self._receive, self._on_connection_end)

    # -- commands -----------------------------------------------------------------------------------------------------

    def about(self) -> Message:
        """Return what the agent reports about itself: its job, generation, membership and workers."""
        answer = self.send_command("about", protocol=PROTOCOL)
        self.agent = answer.get("agent")
        return answer

    def attach(self, *, since: int = LATEST) -> None:
        """Subscribe to the agent's events after number *since*; return when the replayed ones are in the event queue."""
        answer = self.send_command("attach", since=since, protocol=PROTOCOL)
        self.agent = answer["agent"]
        with self._numbering:
            self._last_event = max(int(answer["since"]), self._last_event or 0)  # some may have arrived already
        self.send_command("ping")  # the stream keeps its order: the answer comes after the replayed events

    @property
    def is_unreachable(self) -> bool:
        """Return whether the connection has been missing for so long that commands do not wait for the next one."""
        since = self.disconnected_since
        return since is not None and time.monotonic() - since > PATIENCE

    def send_command(self, command: str, *, seconds: float = 10.0, **facts: object) -> Message:
        """Send a command and wait up to *seconds* for the answer.

        Raise `CommandRejected` when the agent refuses, `AgentDisconnected` when no answer comes, and `LeaseLost` when the agent reports a
        newer controller of the job.
        """
        answers = queue.SimpleQueue[Message]()
        number = self.send(command, answers.put, **facts)
        end = time.monotonic() + seconds
        try:
            while (remaining := end - _handled_until()) > 0 and not self.is_unreachable:
                with suppress(queue.Empty):
                    return self.checked(command, answers.get(timeout=remaining if remaining < PATIENCE else PATIENCE / 4))
            return self.checked(command, answers.get_nowait())
        except queue.Empty:
            raise self.no_answer(command, seconds) from None
        finally:
            self.forget(number)

    def checked(self, command: str, answer: Message) -> Message:
        """Return the *answer* to a command; raise `CommandRejected` or `LeaseLost` for a refusal, `AgentDisconnected` for a lost agent."""
        if answer.get("event") == "agent.disconnected":
            raise AgentDisconnected(self.node, str(answer.get("why")))
        if answer.get("ok") is not True:
            if self.superseded:
                raise LeaseLost(self.job or "", f"a newer controller (epoch {self.superseded})")
            raise CommandRejected(self.node, str(answer.get("why", "it gave no reason")), command)
        if why := answer_error(command, answer):
            raise CommandRejected(self.node, f"its agent sent an invalid answer: {why}", command)
        return answer

    def no_answer(self, command: str, seconds: float) -> AgentDisconnected:
        """Return the error for a command that was not answered within *seconds*."""
        if self.disconnected_since is not None:
            return AgentDisconnected(self.node, "reconnecting to it")
        return AgentDisconnected(self.node, f"no answer to '{command}' within {seconds:.0f} s")

    def send(self, command: str, callback: Callable[[Message], None], **facts: object) -> int:
        """Send a command without waiting; return its number. *callback* receives the answer, or the event of the agent's loss."""
        with self._lock:
            self._number, self.last_sent = self._number + 1, time.monotonic()
            number = self._number
            if self.lost_reason:
                raise AgentDisconnected(self.node, self.lost_reason)
            if self.is_unreachable:
                raise AgentDisconnected(self.node, "reconnecting to it")
            line = encode({"id": number, "do": command, "epoch": self.epoch, "job": self.job, "session": self._session, **facts})
            self._callbacks[number], self._unanswered[number] = callback, line
            if self.disconnected_since is None:
                with suppress(OSError):  # the reactor sees the end as well, and the command is sent again
                    self._socket.sendall(line)
        return number

    def forget(self, number: int) -> None:
        """Drop the callback of this command, and do not send it again."""
        self._callbacks.pop(number, None)
        self._unanswered.pop(number, None)

    def is_writable(self) -> bool:
        """Return whether a command can be sent now without waiting for the agent to read the earlier ones."""
        if self.disconnected_since is not None:
            return True  # it is kept for the next connection
        writable = select.poll()
        try:
            writable.register(self._socket, select.POLLOUT)
        except (OSError, ValueError):  # closed meanwhile
            return True
        return bool(writable.poll(0))

    def ping(self) -> None:
        """Renew the agent's lease and have it answer, without waiting for the answer."""
        if self.disconnected_since is None:
            with suppress(AgentDisconnected):
                if self.catching_up is None:
                    self.forget(self.send("ping", lambda _: None))
                elif not self._probing:
                    self._probing = True  # before it is sent: the answer may be here before its number is
                    self._probe = self.send("ping", partial(self._note_caught_up, time.monotonic()))

    def _note_caught_up(self, at: float, answer: Message) -> None:
        """Note that the agent has answered a ping of *at* (monotonic): the stream keeps its order, so nothing older is on its way."""
        if "event" in answer:  # it is lost
            return
        self._probing, self.known_until = False, max(self.known_until, at)
        if self.catching_up is not None and at >= self.catching_up:
            self.catching_up = None

    def receives_within(self, since: float, seconds: float) -> bool:
        """Return whether anything is received after *since* (monotonic), waiting up to *seconds* for it."""
        end = time.monotonic() + seconds
        while True:
            is_over = self.lost_reason is not None or _handled_until() >= end
            if self.last_received > since and self.disconnected_since is None and not self.lost_reason:
                return True
            if is_over:
                return False
            time.sleep(0.01)

    def close(self) -> None:
        """Close the connection on purpose: the event queue gets no event for it."""
        self._closed.set()
        with self._lock:
            sock, registration = self._socket, self._registration
        if REACTOR.drop(registration):
            self._end("its connection was closed")
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    # -- receiving and reconnecting -----------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        now = time.monotonic()
        if self.catching_up is None and now - self.last_received > self.gap:
            self.catching_up = now
        self.last_received = now
        if self.catching_up is None:
            self.known_until = now
        if not self._event_queue.has_room(self.node, len(data)):  # the agent replays it later
            raise OSError("it sends more events than one node may have waiting here")
        for message in self._lines.feed(data):
            self._dispatch(message)

    def _dispatch(self, message: Message) -> None:
        if "event" in message:
            number = message.get("seq")
            if number is not None:
                with self._numbering:
                    if self._last_event is not None and number <= self._last_event:
                        return  # received before the connection ended
                    self._last_event = number
            self._event_queue.put((self.node, message))
            return
        if not message.get("ok") and isinstance(newer := message.get("epoch"), int) and newer > self.epoch:
            self.superseded = newer
        number = message.get("re")
        if not isinstance(number, int):  # an answer to no command
            return
        self._unanswered.pop(number, None)
        if (callback := self._callbacks.get(number)) is not None:
            callback(message)

    def _on_connection_end(self, error: OSError | None) -> None:
        """Reconnect in a thread of its own, so that the reactor keeps reading from the other agents."""
        why = "its connection ended" + (f" ({error})" if error is not None else "")
        if self._closed.is_set():
            self._end(why)
            return
        self._socket.close()
        self.disconnected_since, self.failed_attempts = time.monotonic(), 0
        threading.Thread(target=self._reconnect, args=(why,), name=f"reconnect-{self.node}", daemon=True).start()

    def _reconnect(self, why: str) -> None:
        try:
            lines = self._connect_again()
        except OSError as error:
            self._end(f"{why}; {error}" if str(error) else why)
            return
        with self._lock:
            self._lines = lines
            self._registration = registration = REACTOR.add(self._socket, self._receive, self._on_connection_end)
        if self._closed.is_set() and REACTOR.drop(registration):  # closed in between
            self._socket.close()
            self._end(why)

    def _connect_again(self) -> LineBuffer:
        """Connect to the same agent again, as long as it may still be there; raise ``OSError`` once it is known to be lost."""
        attempt = 0
        while True:
            while not self._event_queue.has_room(self.node) and not self._closed.wait(ROOM_CHECK):
                pass
            delay = RECONNECT_DELAYS[min(attempt, len(RECONNECT_DELAYS) - 1)]
            attempt += 1
            if self._closed.wait(delay):
                raise OSError
            try:
                sock = self._connect()
            except (TimeoutError, ProtocolMismatch) as error:
                if not self.failed_attempts:
                    note(log, "agent.unreachable", node=self.node, why=error)
                self.failed_attempts += 1
                continue
            except OSError as error:
                raise OSError(f"nothing listens there ({error})") from error
            try:
                return self._resume(sock)
            except Disconnection:
                self.failed_attempts += 1
                sock.close()

    def _resume(self, sock: socket.socket) -> LineBuffer:
        """Check who listens at *sock* and continue where the last connection ended; raise `Disconnection` when that fails."""
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
                    raise Disconnection("it closed the connection")
                first = list(lines.feed(data))
            sock.settimeout(None)
        except (OSError, BadLine) as error:
            raise Disconnection(str(error)) from error
        if first[0].get("agent") != self.agent:
            sock.close()
            raise OSError("another agent listens there now")
        with self._lock:
            self._socket, self.disconnected_since = sock, None
            self.last_received = self.catching_up = time.monotonic()
            self.forget(self._probe)
            self._probing = False
            waiting = [line for _, line in sorted(self._unanswered.copy().items())]  # other threads give commands up meanwhile
            with suppress(OSError):  # the reactor sees the end
                if self._last_event is not None:
                    fields = {"since": self._last_event, "protocol": PROTOCOL, "epoch": self.epoch, "job": self.job}
                    sock.sendall(encode({"id": 0, "do": "attach", **fields}))
                sock.sendall(b"".join(waiting))
        note(log, "agent.reconnected", node=self.node, since=self._last_event, again=len(waiting))
        return lines

    def _end(self, why: str) -> None:
        age = 0.0 if self.disconnected_since is None else time.monotonic() - self.disconnected_since
        self.lost_at, self.lost_reason = time.time() - age, why
        message = {"event": "agent.disconnected", "why": why, "at": self.lost_at}
        for callback in list(self._callbacks.values()):
            callback(message)
        if not self._closed.is_set():
            note(log, "agent.disconnected", node=self.node, why=why)
            self._event_queue.put((self.node, message))


def _handled_until() -> float:
    """Return until when (monotonic) the answers that had arrived were handled.

    By a deadline that is measured so, no answer is late because this process was stopped, or the reactor's thread waited for a processor.
    """
    return max(REACTOR.caught_up, time.monotonic() - LAG_SECONDS)


class Broadcast:
    """The answers to one command that was sent to many agents. The thread that waits is woken once, by the last answer."""

    CHECK: Final = 0.5
    """Seconds between two checks which agents are unreachable: their answers are not waited for."""

    def __init__(self, command: str, seconds: float, count: int) -> None:
        """Wait for *count* answers, up to *seconds* from now."""
        self._command, self._seconds, self._end = command, seconds, time.monotonic() + seconds
        self._answers: dict[str, Message | WorldError] = {}
        self._missing = count
        self._sent: dict[str, tuple[AgentClient, int]] = {}
        self._lock, self._complete = threading.Lock(), threading.Event()
        if not count:
            self._complete.set()

    def send(self, client: AgentClient, facts: Mapping[str, object]) -> None:
        """Send the command to one agent; an error counts as its answer."""

        def take(answer: Message) -> None:
            try:
                self.note_answer(client.node, client.checked(self._command, answer))
            except WorldError as error:
                self.note_answer(client.node, error)

        try:
            self._sent[client.node] = client, client.send(self._command, take, **facts)
        except WorldError as error:
            self.note_answer(client.node, error)

    def note_answer(self, node: str, answer: Message | WorldError) -> None:
        """Take *answer* for that of *node*, unless there is one."""
        with self._lock:
            if node not in self._answers:
                self._answers[node] = answer
                self._missing -= 1
                if not self._missing:
                    self._complete.set()

    def wait(self, nodes: Iterable[str]) -> dict[str, Message | WorldError]:
        """Return what each of *nodes* answered, or why it did not, in their order."""
        while not self._complete.wait(max(0.01, min(self.CHECK, self._end - time.monotonic()))) and _handled_until() < self._end:
            for client, _ in list(self._sent.values()):
                if client.is_unreachable:
                    self.note_answer(client.node, client.no_answer(self._command, self._seconds))
        for client, number in list(self._sent.values()):
            client.forget(number)
        with self._lock:
            return {node: self._answers[node] if node in self._answers else self._no_answer(node) for node in nodes}

    def _no_answer(self, node: str) -> AgentDisconnected:
        if node in self._sent:
            return self._sent[node][0].no_answer(self._command, self._seconds)
        return AgentDisconnected(node, f"the command '{self._command}' could not be sent within {self._seconds:.0f} s")
