"""The worker's connection to the agent of its node: JSON lines over the socket named by ``HOLDFAST_SOCKET``.

Sending never blocks training: the socket is non-blocking, what it does not accept waits in a bounded queue that drops its oldest
heartbeats first, and the loss of the agent is ignored. Without the variable everything here does nothing.
Standard library only: importing this does not import torch.
"""

from __future__ import annotations

import operator
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from holdfast.protocol import PROTOCOL, BadLine, LineBuffer, Message, connect, encode
from holdfast.runtime.peer_errors import describe

QUEUE: Final = 1000
"""Messages kept while the agent does not read."""

ANSWER_SECONDS: Final = 10.0
"""How long a worker waits for permission to commit a checkpoint; the agent answers from memory, in well under a millisecond."""

LATE_SECONDS: Final = 10.0
"""How long after its deadline an answer is waited for that has arrived and was not read yet: this process was stopped meanwhile."""

FINAL_CHECKPOINT_SECONDS: Final = 2.0
"""How long the last messages of a worker (an exception, the end of its steps) may take to be sent."""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """The agent's answer to a request: *ok* or not, and *why*; with a new checkpoint interval if the controller has chosen one."""

    ok: bool
    why: str
    every: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What all ranks together computed in a step; None where that is not reported."""

    samples: int | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, function: str, samples: object, tokens: object) -> Self:
        """Return the size that a script gave to *function*; raise ``TypeError`` or ``ValueError`` for what is no count."""
        return cls(samples=_size(function, "samples", samples), tokens=_size(function, "tokens", tokens))

    def as_fields(self) -> dict[str, int]:
        """Return what is reported, as fields of a message."""
        named = {"samples": self.samples, "tokens": self.tokens}
        return {name: number for name, number in named.items() if number is not None}


def _size(function: str, name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # checked here
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{function}({name}=...) got a {kind}, but must be a whole number: the {name} of all ranks") from None
    if number < 0:
        raise ValueError(f"{function}({name}={number}): the number of {name} cannot be negative")
    return number


class AgentLink:
    """One worker's messages to its agent; every method returns at once, and none raises because of the agent."""

    def __init__(self, path: Path | None, *, rank: int = 0, generation: int = 0) -> None:
        self.rank, self.generation = rank, generation
        self.step: int | None = None
        """The current step, which is sent with an exception."""
        self.has_session = False
        """A session reports this process's steps."""
        self._path = path
        self._socket: socket.socket | None = None
        self._queue: deque[tuple[bool, bytes]] = deque()
        """Messages to be sent: whether each may be dropped, and its bytes."""
        self._lock, self._requesting = threading.RLock(), threading.Lock()
        self._draining = self._disconnected = self._exception_sent = False
        self._sender: threading.Thread | None = None
        self._requests = 0
        self._receiver: threading.Thread | None = None
        self._receiving = False
        """The receiver handles what it has read, or is about to read."""
        self._on_command: Callable[[Message], None] = lambda _command: None
        self._answers: dict[int, Message] = {}
        self._answered = threading.Condition()

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> AgentLink:
        """Return the connection that *environment* describes; without ``HOLDFAST_SOCKET`` it does nothing."""
        path = environment.get("HOLDFAST_SOCKET")
        rank, generation = (int(environment.get(name) or 0) for name in ("RANK", "HOLDFAST_GENERATION"))
        return cls(Path(path) if path else None, rank=rank, generation=generation)

    @property
    def attached(self) -> bool:
        """Whether there is an agent: the environment names it, and the connection has not ended."""
        return self._path is not None and not self._disconnected

    def hello(self) -> None:
        """Announce this worker; the first message of any kind does it too."""
        self._send(None)

    def mark(self, name: str, seconds: float) -> None:
        """Report how long a part of the startup took: ``group`` or ``load``."""
        self._send({"t": "mark", "name": name, "seconds": seconds, "generation": self.generation})

    def resumed(self, step: int, path: Path | None, *, replica: bool = False) -> None:
        """Report the step after which training resumes (0: from scratch), and the checkpoint, or *replica* in memory, it came from."""
        message = {"t": "resumed", "step": step, "path": None if path is None else str(path), "generation": self.generation}
        self._send(message | ({"replica": True} if replica else {}))

    def beat(
        self,
        step: int,
        loss: float | None,
        seconds: float,
        until: int | None,
        size: StepSize | None = None,
        **more: Mapping[str, object] | None,
    ) -> None:
        """Report that *step* is committed; may be dropped while the agent does not read.

        *more*: the statistics of the ``snapshot`` in memory, and the ``timing``: how the step spent its time.
        """
        message = {"t": "beat", "step": step, "loss": loss, "seconds": seconds, "until": until, "generation": self.generation}
        message |= {} if size is None else size.as_fields()
        self._send(message | {name: dict(value) for name, value in more.items() if value}, droppable=True)

    def heartbeat(self, step: int, loss: float | None, seconds: float, until: int | None, size: StepSize) -> None:
        """Report that *step* is done in a process that keeps its own state; may be dropped while the agent does not read."""
        message = {"t": "beat", "step": step, "loss": loss, "seconds": seconds, "until": until, "generation": self.generation}
        self._send({**message, **size.as_fields(), "heartbeat": True}, droppable=True)

    def section(self, name: str, limit_s: float | None, *, begin: bool) -> None:
        """Report that a declared long section begins or ends."""
        self._send({"t": "section", "name": name, "limit_s": limit_s, "begin": begin})

    def saved(self, step: int, path: Path, seconds: float, size: int, **more: float) -> None:
        """Report a complete checkpoint of *size* bytes at *path*, for which training paused for *seconds*.

        *more*: ``overlapped``, the seconds for which it was written alongside training, and its ``generation``, from a checkpoint writer.
        """
        self._send({"t": "saved", "step": step, "path": str(path), "seconds": seconds, "size": size, **more})

    def storage_error(self, kind: str, step: int | None, path: Path, why: str, *, rank: int | None = None) -> None:
        """Report an error with a checkpoint, or with the part of that *rank*."""
        message = {"t": "storage-error", "kind": kind, "step": step, "path": str(path), "why": why}
        self._send(message if rank is None else {**message, "rank": rank})

    def exception(self, error: BaseException, step: int | None = None) -> None:
        """Report the exception that ends this worker, once, and wait briefly until it is sent."""
        if self._exception_sent:
            return
        self._exception_sent = True
        self._send(describe(error, self.step if step is None else step))
        self.flush(FINAL_CHECKPOINT_SECONDS)

    def finished(self, step: int) -> None:
        """Report that all steps are done and exit status 0 follows, and wait briefly until it is sent."""
        self._send({"t": "finished", "step": step})
        self.flush(FINAL_CHECKPOINT_SECONDS)

    def request_write(self) -> None:
        """Report that a snapshot is to be written to disk, by the agent's checkpoint writer, else by a process of this interpreter."""
        self._send({"t": "flush", "python": sys.executable})

    def report(self, message: str, **facts: object) -> None:
        """Send a message about managed groups; docs/reference/protocol.md lists them."""
        self._send({"t": message, **facts})

    def may_commit(self, step: int, seconds: float = ANSWER_SECONDS, *, generation: int | None = None) -> AgentAnswer:
        """Request permission for this generation (or that one) to publish its checkpoint of *step*; granted without an agent."""
        return self._request({"t": "commit-request", "step": step} | ({} if generation is None else {"generation": generation}), seconds)

    def register_successor(self, pid: int) -> AgentAnswer:
        """Request that the process *pid*, a child of this one, counts as this worker from now on."""
        return self._request({"t": "register-successor", "pid": pid}, ANSWER_SECONDS)

    def _request(self, request: Message, seconds: float) -> AgentAnswer:
        """Send *request* and wait up to *seconds* for its answer."""
        if self._path is None:
            return AgentAnswer(ok=True, why="no agent")
        with self._requesting:
            self._requests += 1
            number, deadline = self._requests, time.monotonic() + seconds
            self._send({**request, "id": number})
            if self._receiver is not None and (answer := self._received(number, deadline)) is not None:
                return _answer(answer)
            lines = LineBuffer()
            while self._receiver is None and self._ready(select.POLLIN, deadline):
                self._drain()
                for message in self._receive(lines):
                    if message.get("re") == number:
                        return _answer(message)
        state = "has exited" if self._disconnected else "does not answer"
        return AgentAnswer(ok=False, why=f"the agent {state}, so it is unknown whether this generation is the current one")

    def _received(self, number: int, deadline: float) -> Message | None:
        """Return the answer to request *number* once the receiver has it; None at the deadline, or when the connection has ended.

        After a stop of this process the receiver may continue later than this thread: what has arrived by then is waited for.
        """

        def is_over() -> bool:
            return number in self._answers or self._disconnected

        with self._answered:
            self._answered.wait_for(is_over, max(0.0, deadline - time.monotonic()))
            end = time.monotonic() + LATE_SECONDS
            while not is_over() and self._is_receiving() and time.monotonic() < end:
                self._answered.wait(0.01)
            return self._answers.pop(number, None)

    def _is_receiving(self) -> bool:
        """Return whether something has arrived that the receiver has not handled."""
        return self._ready(select.POLLIN, 0.0) or self._receiving  # in this order: what it has read since then sets the second

    def listen(self, on_command: Callable[[Message], None]) -> None:
        """Have a thread call *on_command* for every command of the agent from now on."""
        self._on_command = on_command
        self.hello()
        if self.attached and self._receiver is None:
            self._receiver = threading.Thread(target=self._receive_commands, name="holdfast-commands", daemon=True)
            self._receiver.start()

    def _receive_commands(self) -> None:
        lines = LineBuffer()
        while self._ready(select.POLLIN, time.monotonic() + 3600.0) or not self._disconnected:
            self._drain()
            self._receiving = True
            for message in self._receive(lines):
                if "do" in message:
                    self._on_command(message)
                else:
                    with self._answered:
                        self._answers[int(message.get("re") or 0)] = message
                        self._answered.notify_all()
            self._receiving = False

    def flush(self, seconds: float) -> bool:
        """Wait until all messages are sent, for at most *seconds*; return whether they are."""
        deadline = time.monotonic() + seconds
        while self._has_unsent():
            if not self._ready(select.POLLOUT, deadline):
                return False
            self._drain()
        return True

    def mute(self) -> None:
        """Close the connection without a message: a forked child must not send for its parent, or keep its connection open."""
        self._path = None
        self._disconnected = True
        if self._socket is not None:
            self._socket.close()

    def _receive(self, lines: LineBuffer) -> list[Message]:
        """Return the messages that have arrived completely."""
        assert self._socket is not None
        try:
            data = self._socket.recv(65536)
            if data:
                return list(lines.feed(data))
        except BlockingIOError:
            return []
        except (OSError, BadLine):
            pass
        self._disconnect()
        return []

    def _ready(self, events: int, deadline: float) -> bool:
        """Wait until the connection can be read (or written, as *events* say); return False at the deadline or when it has ended.

        A process that was stopped leaves ``poll`` when its timeout has passed, without what has arrived meanwhile: it looks again.
        """
        line = self._socket
        if line is None or self._disconnected:
            return False
        poll = select.poll()
        poll.register(line, events | (select.POLLOUT if self._has_unsent() else 0))
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000) or poll.poll(0))

    def _send(self, message: Message | None, *, droppable: bool = False) -> None:
        """Queue *message* after the hello, and send as much as the socket accepts now."""
        if self._path is None or self._disconnected:
            return
        with self._lock:
            if self._socket is None and not self._connect():
                return
            if message is not None:
                self._queue.append((droppable, encode(message)))
            while len(self._queue) > QUEUE:  # drop the oldest heartbeat, or the oldest message that is not half sent
                heartbeats = (place for place, (can_drop, _) in enumerate(self._queue) if can_drop)
                del self._queue[next(heartbeats, 1)]
            self._drain()
            if self._queue and (self._sender is None or not self._sender.is_alive()):
                self._sender = threading.Thread(target=self._send_rest, name="holdfast-link", daemon=True)
                self._sender.start()

    def _connect(self) -> bool:
        """Connect and put the hello at the head of the queue."""
        assert self._path is not None
        try:
            self._socket = connect(self._path, seconds=1.0)
        except OSError:
            self._disconnect()
            return False
        self._socket.settimeout(0)
        hello = {"t": "hello", "protocol": PROTOCOL, "rank": self.rank, "generation": self.generation}
        self._queue.append((False, encode(hello)))
        return True

    def _drain(self) -> None:
        """Send what the socket accepts without waiting; after the end of the connection everything is dropped."""
        with self._lock:
            if self._draining or self._socket is None:  # a signal handler that sends must not interrupt a line
                return
            self._draining = True
            try:
                while self._queue:
                    line = self._queue[0][1]
                    sent = self._socket.send(line, socket.MSG_NOSIGNAL)
                    if sent < len(line):
                        self._queue[0] = (False, line[sent:])  # half a line must be finished
                        return
                    self._queue.popleft()
            except BlockingIOError:
                return
            except OSError:
                self._disconnect()
            finally:
                self._draining = False

    def _send_rest(self) -> None:
        """Send what is left in the queue: the begin of a section must arrive even when no message follows it."""
        while self._has_unsent() and self._socket is not None:
            self._ready(select.POLLOUT, time.monotonic() + 60.0)
            self._drain()

    def _has_unsent(self) -> bool:
        return bool(self._queue) and not self._disconnected

    def _disconnect(self) -> None:
        """Record that the agent is lost; training goes on without it."""
        self._disconnected = True
        self._queue.clear()
        with self._answered:
            self._answered.notify_all()


def _answer(message: Message) -> AgentAnswer:
    every = message.get("every")
    interval = every if isinstance(every, int) and not isinstance(every, bool) and every > 0 else None
    return AgentAnswer(ok=message.get("ok") is True, why=str(message.get("why", "")), every=interval)


_of_this_process: AgentLink | None = None


def link() -> AgentLink:
    """Return this process's connection to its agent, created from the environment at the first call."""
    global _of_this_process  # noqa: PLW0603 (a process has one agent, and forked children must find this one to mute it)
    if _of_this_process is None:
        _of_this_process = AgentLink.from_env()
    return _of_this_process


def _mute_in_child() -> None:
    """Close the connection in a forked child, such as a data loader's worker."""
    if _of_this_process is not None:
        _of_this_process.mute()


os.register_at_fork(after_in_child=_mute_in_child)
