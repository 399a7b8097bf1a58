"""The worker's line to the agent of its node: JSON lines over the socket named by ``HOLDFAST_SOCKET``.

Sending never blocks training: the socket does not block, what it does not take waits in a bounded queue that loses its
oldest heartbeats first, and a vanished agent is ignored. Without the variable everything here does nothing.
Standard library only: importing this costs no torch.
"""

from __future__ import annotations

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
from typing import Final

from holdfast.protocol import PROTOCOL, BadLine, LineBuffer, Message, connect, encode
from holdfast.runtime.peer_errors import describe

QUEUE: Final = 1000
"""Messages kept while the agent does not read."""

ANSWER_SECONDS: Final = 10.0
"""How long a worker waits for leave to commit a checkpoint; the agent answers from memory, in well under a millisecond."""

FINAL_CHECKPOINT_SECONDS: Final = 2.0
"""How long the last words of a worker (an exception, a goodbye) may take to leave."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The agent's answer to ``commit?``: *ok* or not, and *why*; with how often to save from then on, if the flow has a wish."""

    ok: bool
    why: str
    every: int | None = None


class AgentLink:
    """One worker's messages to its agent; every method returns at once and none raises for the agent's sake."""

    def __init__(self, path: Path | None, *, rank: int = 0, generation: int = 0) -> None:
        self.rank, self.generation = rank, generation
        self.step: int | None = None
        """The step in work; goes along with an exception."""
        self.has_session = False
        """A session reports this process's steps."""
        self._path = path
        self._socket: socket.socket | None = None
        self._queue: deque[tuple[bool, bytes]] = deque()
        self._lock, self._asking = threading.RLock(), threading.Lock()
        self._draining = self._parted = self._reported = False
        self._helper: threading.Thread | None = None
        self._asked = 0
        self._listener: threading.Thread | None = None
        self._order: Callable[[Message], None] = lambda _order: None
        self._told: dict[int, Message] = {}
        self._news = threading.Condition()

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> AgentLink:
        """Make the link that *environment* describes; one without ``HOLDFAST_SOCKET`` does nothing."""
        path = environment.get("HOLDFAST_SOCKET")
        rank, generation = (int(environment.get(name) or 0) for name in ("RANK", "HOLDFAST_GENERATION"))
        return cls(Path(path) if path else None, rank=rank, generation=generation)

    @property
    def attached(self) -> bool:
        """Whether there is an agent to speak to: it was named, and its line has not ended."""
        return self._path is not None and not self._parted

    def hello(self) -> None:
        """Announce this worker; the first message of any kind does it too."""
        self._send(None)

    def mark(self, name: str, seconds: float) -> None:
        """Tell how long a part of the start took: ``group`` or ``load``."""
        self._send({"t": "mark", "name": name, "seconds": seconds, "generation": self.generation})

    def resumed(self, step: int, path: Path | None, *, replica: bool = False) -> None:
        """Tell the step after which training goes on (0: from scratch), and the checkpoint, or *replica* in memory, it came from."""
        told = {"t": "resumed", "step": step, "path": None if path is None else str(path), "generation": self.generation}
        self._send(told | ({"replica": True} if replica else {}))

    def beat(self, step: int, loss: float | None, seconds: float, until: int | None, **more: Mapping[str, object] | None) -> None:
        """Tell that *step* is committed; may be dropped when the agent does not read.

        *more*: what there is to say of the ``snapshot`` in memory, and the ``pace``: how the step spent its time.
        """
        told = {"t": "beat", "step": step, "loss": loss, "seconds": seconds, "until": until, "generation": self.generation}
        self._send(told | {name: dict(value) for name, value in more.items() if value}, droppable=True)

    def heartbeat(self, step: int, loss: float | None, seconds: float, until: int | None) -> None:
        """Tell that *step* is done in a process that keeps its own state; may be dropped when the agent does not read."""
        told = {"t": "beat", "step": step, "loss": loss, "seconds": seconds, "until": until, "generation": self.generation}
        self._send({**told, "heartbeat": True}, droppable=True)

    def section(self, name: str, limit_s: float | None, *, begin: bool) -> None:
        """Tell that a declared long section begins or ends."""
        self._send({"t": "section", "name": name, "limit_s": limit_s, "begin": begin})

    def saved(self, step: int, path: Path, seconds: float, size: int, **more: float) -> None:
        """Tell that a checkpoint of *size* bytes stands at *path*, for which training stood still for *seconds*.

        *more*: ``beside``, the seconds for which it was written beside training, and its ``generation``, of who is no rank.
        """
        self._send({"t": "saved", "step": step, "path": str(path), "seconds": seconds, "size": size, **more})

    def storage_error(self, kind: str, step: int | None, path: Path, why: str, *, rank: int | None = None) -> None:
        """Report something wrong with a checkpoint, or with the part of that *rank*."""
        told = {"t": "storage_error", "kind": kind, "step": step, "path": str(path), "why": why}
        self._send(told if rank is None else {**told, "rank": rank})

    def exception(self, error: BaseException, step: int | None = None) -> None:
        """Report the exception that ends this worker, once, and wait a moment until it has left."""
        if self._reported:
            return
        self._reported = True
        self._send(describe(error, self.step if step is None else step))
        self.flush(FINAL_CHECKPOINT_SECONDS)

    def finished(self, step: int) -> None:
        """Say that all steps are done and exit 0 follows, and wait a moment until it has left."""
        self._send({"t": "finished", "step": step})
        self.flush(FINAL_CHECKPOINT_SECONDS)

    def want_written(self) -> None:
        """Tell that a snapshot is to be put on disk, by whom the agent has for that, else by a process of this interpreter."""
        self._send({"t": "flush", "python": sys.executable})

    def may_commit(self, step: int, seconds: float = ANSWER_SECONDS, *, generation: int | None = None) -> Leave:
        """Ask whether this generation (or that one) may still put its checkpoint of *step* in place; without an agent it may."""
        return self._ask({"t": "commit?", "step": step} | ({} if generation is None else {"generation": generation}), seconds)

    def register_successor(self, pid: int) -> Leave:
        """Ask that the process *pid*, a child of this one, count as this worker from now on."""
        return self._ask({"t": "successor?", "pid": pid}, ANSWER_SECONDS)

    def _ask(self, question: Message, seconds: float) -> Leave:
        if self._path is None:
            return Leave(ok=True, why="no agent")
        with self._asking:
            self._asked += 1
            number = self._asked
            self._send({**question, "id": number})
            return self._answer(number, time.monotonic() + seconds)

    def report(self, word: str, **facts: object) -> None:
        """Tell what belongs to the life of managed groups; docs/architecture.md lists the words."""
        self._send({"t": word, **facts})

    def listen(self, order: Callable[[Message], None]) -> None:
        """Have a thread hand every order of the agent to *order*, from now on."""
        self._order = order
        self.hello()
        if self.attached and self._listener is None:
            self._listener = threading.Thread(target=self._follow, name="holdfast-orders", daemon=True)
            self._listener.start()

    def _follow(self) -> None:
        lines = LineBuffer()
        while self._ready(select.POLLIN, time.monotonic() + 3600.0) or not self._parted:
            self._drain()
            for message in self._heard(lines):
                if "do" in message:
                    self._order(message)
                else:
                    with self._news:
                        self._told[int(message.get("re") or 0)] = message
                        self._news.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until everything said has left, for at most *seconds*; say whether it has."""
        deadline = time.monotonic() + seconds
        while self._waiting():
            if not self._ready(select.POLLOUT, deadline):
                return False
            self._drain()
        return True

    def mute(self) -> None:
        """Let go of the line without a word: a forked child must not speak, or hold the line open, for its parent."""
        self._path = None
        self._hang_up()

    def _answer(self, number: int, deadline: float) -> Leave:
        """Read until the agent has answered question *number*."""
        if self._listener is not None:
            with self._news:
                self._news.wait_for(lambda: number in self._told or self._parted, max(0.0, deadline - time.monotonic()))
                if number in self._told:
                    return _leave(self._told.pop(number))
        lines = LineBuffer()
        while self._listener is None and self._ready(select.POLLIN, deadline):
            self._drain()
            for message in self._heard(lines):
                if message.get("re") == number:
                    return _leave(message)
        gone = "is gone" if self._parted else "does not answer"
        return Leave(ok=False, why=f"the agent {gone}, so nobody can say that this generation is the current one")

    def _heard(self, lines: LineBuffer) -> list[Message]:
        """Return the messages that have arrived whole."""
        assert self._socket is not None
        try:
            data = self._socket.recv(65536)
            if data:
                return list(lines.feed(data))
        except BlockingIOError:
            return []
        except (OSError, BadLine):
            pass
        self._part()
        return []

    def _ready(self, wanted: int, deadline: float) -> bool:
        """Wait until the line can be read (or written, as *wanted*); no when time is up or the line ended."""
        line = self._socket
        if line is None or self._parted:
            return False
        poll = select.poll()
        poll.register(line, wanted | (select.POLLOUT if self._waiting() else 0))
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _send(self, message: Message | None, *, droppable: bool = False) -> None:
        """Queue *message* behind the hello and pass on as much as the line takes now."""
        if self._path is None or self._parted:
            return
        with self._lock:
            if self._socket is None and not self._open():
                return
            if message is not None:
                self._queue.append((droppable, encode(message)))
            while len(self._queue) > QUEUE:
                self._forget_one()
            self._drain()
            if self._queue and (self._helper is None or not self._helper.is_alive()):
                self._helper = threading.Thread(target=self._pass_on, name="holdfast-link", daemon=True)
                self._helper.start()

    def _open(self) -> bool:
        """Connect and put the hello at the head of the queue."""
        assert self._path is not None
        try:
            self._socket = connect(self._path, seconds=1.0)
        except OSError:
            self._part()
            return False
        self._socket.settimeout(0)
        hello = {"t": "hello", "protocol": PROTOCOL, "rank": self.rank, "generation": self.generation}
        self._queue.append((False, encode(hello)))
        return True

    def _drain(self) -> None:
        """Send what the line takes without waiting; a line that ended takes everything, to nowhere."""
        with self._lock:
            if self._draining or self._socket is None:  # a signal handler that speaks must not cut into a line
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
                self._part()
            finally:
                self._draining = False

    def _forget_one(self) -> None:
        """Drop the oldest heartbeat, or the oldest whole message when there is none."""
        droppable = (place for place, (beat, _) in enumerate(self._queue) if beat)
        del self._queue[next(droppable, 1)]

    def _pass_on(self) -> None:
        """Send what stayed behind: a section that began must be told even when nothing follows it."""
        while self._waiting() and self._socket is not None:
            self._ready(select.POLLOUT, time.monotonic() + 60.0)
            self._drain()

    def _waiting(self) -> bool:
        """Say whether anything is still to be sent."""
        return bool(self._queue) and not self._parted

    def _part(self) -> None:
        """Take note that the agent is gone; training goes on without it."""
        self._parted = True
        self._queue.clear()
        with self._news:
            self._news.notify_all()

    def _hang_up(self) -> None:
        """Close this process's end."""
        self._parted = True
        if self._socket is not None:
            self._socket.close()


def _leave(message: Message) -> Leave:
    every = message.get("every")
    wish = every if isinstance(every, int) and not isinstance(every, bool) and every > 0 else None
    return Leave(ok=message.get("ok") is True, why=str(message.get("why", "")), every=wish)


_ours: AgentLink | None = None


def link() -> AgentLink:
    """Return this process's one link, made from the environment at the first call."""
    global _ours  # noqa: PLW0603 (a process has one agent, and forked children must find this one to mute it)
    if _ours is None:
        _ours = AgentLink.from_env()
    return _ours


def _mute_in_child() -> None:
    """Silence the line in a forked child, such as a data loader's worker."""
    if _ours is not None:
        _ours.mute()


os.register_at_fork(after_in_child=_mute_in_child)
