"""A process that works beside the agent: told and heard over a socket, and started again when it dies."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.agent import schema
from holdfast.agent.connection import MessageStream
from holdfast.agent.node.identity import Identity
from holdfast.agent.workers.fork_server import spawn
from holdfast.log import note
from holdfast.process import kill
from holdfast.protocol import BadLine, Message

log = logging.getLogger("holdfast.agent")

MOST: Final = 10
"""How often a helper may die; after that it is given up."""
PAUSE: Final = 0.5
"""Seconds before it is started again the first time; each time takes as much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSpec:
    """What a helper is there for."""

    name: str
    """Its log is `NAME.log` in the node's folder."""
    command: Callable[[int], tuple[tuple[str, ...], tuple[int, ...]]]
    """From the descriptor of its end of the socket to the command, and the descriptors that it has beside."""
    begun: Callable[[], None]
    """Called when it has been started: time to say what it is to do."""
    heard: Callable[[Message], None]
    """Called with each message; raises `BadField` for one that it cannot understand."""
    lost: Callable[[], None]
    """Called when it has died: what it alone knew is not known any more."""
    given_up: Callable[[str], None]
    """Called with the reason when it is started no more."""


class Sidecar:
    """The agent's end of a helper."""

    def __init__(self, part: SidecarSpec, me: Identity, selector: selectors.BaseSelector, helpers: set[int]) -> None:
        self._part, self._me, self._selector, self._helpers = part, me, selector, helpers
        self._line: MessageStream | None = None
        self._pid = 0
        self._lost = 0
        self._again_at: float | None = None

    def begin(self) -> None:
        """Start it, with all its lives; raise ``OSError`` when that cannot be."""
        self._lost = 0
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs, (self._me.directory / f"{self._part.name}.log").open("ab") as output:
                command, beside = self._part.command(theirs.fileno())
                passed = [theirs.fileno(), *beside]
                self._pid = spawn(command, output, env={**os.environ, **self._me.marks()}, pass_fds=passed, cwd="/")
        except BaseException:
            ours.close()
            raise
        self._helpers.add(self._pid)
        line = self._line = MessageStream(ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda mask: self._serve(line, mask))
        self._part.begun()

    @property
    def is_alive(self) -> bool:
        """Tell whether it can be spoken to, as far as is known."""
        return self._line is not None

    def say(self, message: Message) -> None:
        """Tell it something; while there is none this is lost."""
        line = self._line
        if line is not None and line.send(message):
            self._watch(line)
        elif line is not None:
            self._gone(line)

    def _watch(self, line: MessageStream) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        key = self._selector.get_key(line.socket)
        if key.events != events:
            self._selector.modify(line.socket, events, key.data)

    def _serve(self, line: MessageStream, mask: int) -> None:
        if line is not self._line:
            return
        if mask & selectors.EVENT_WRITE and not line.drain():
            self._gone(line)
            return
        self._watch(line)
        try:
            going = not mask & selectors.EVENT_READ or line.read()
            while line.event_queue:
                self._part.heard(line.event_queue.popleft())
        except (BadLine, schema.BadField) as error:
            note(log, "helper.garbage", name=self._part.name, why=error)
            going = False
        if not going:
            self._gone(line)

    def _gone(self, line: MessageStream) -> None:
        """Start another one in a moment, unless too many have died."""
        if line is not self._line:
            return
        self._hang_up()
        self._part.lost()
        self._lost += 1
        note(log, "helper.gone", name=self._part.name, lost=self._lost)
        if self._lost < MOST:
            self._again_at = time.monotonic() + PAUSE * self._lost
            return
        self._part.given_up(f"it died {self._lost} times; see {self._me.directory / (self._part.name + '.log')}")

    def _hang_up(self) -> None:
        if self._line is not None:
            self._selector.unregister(self._line.socket)
            self._line.socket.close()
            self._line = None
            if self._pid in self._helpers:  # not reaped yet: the number is its own
                kill(self._pid, signal.SIGKILL)

    def due(self) -> float | None:
        """Return when another one is to be started (monotonic)."""
        return self._again_at

    def tick(self, now: float) -> None:
        """Start another one when it is time."""
        if self._again_at is None or now < self._again_at:
            return
        self._again_at = None
        try:
            self._start()
        except OSError as error:
            self._part.given_up(f"it cannot be started again: {error}")

    def end(self) -> None:
        """End it; nothing starts it again by itself."""
        self._hang_up()
        self._again_at = None
