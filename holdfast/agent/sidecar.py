"""A helper process of the agent: they exchange messages over a socket, and the agent restarts it when it exits."""

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
from holdfast.host.process import kill, spawn
from holdfast.log import note
from holdfast.protocol import BadLine, Message

log = logging.getLogger("holdfast.agent")

MAX_EXITS: Final = 10
"""Exits after which a sidecar is not restarted any more."""
PAUSE: Final = 0.5
"""Seconds before the first restart; each further one waits as much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSpec:
    """What a sidecar runs, and what it calls."""

    name: str
    """Its log is `NAME.log` in the node's folder."""
    command: Callable[[int], tuple[tuple[str, ...], tuple[int, ...]]]
    """From the descriptor of its end of the socket to the command, and further descriptors that it inherits."""
    started: Callable[[], None]
    """Called after each start: time to send it its settings."""
    received: Callable[[Message], None]
    """Called with each message; raises `BadField` for a malformed one."""
    given_up: Callable[[str], None]
    """Called with the reason when it is not restarted any more."""
    exited: Callable[[], None] = lambda: None
    """Called when it has exited: what only it knew is lost."""


class Sidecar:
    """The agent's end of a sidecar."""

    def __init__(self, spec: SidecarSpec, me: Identity, selector: selectors.BaseSelector, pids: set[int]) -> None:
        self._spec, self._me, self._selector, self._pids = spec, me, selector, pids
        self._stream: MessageStream | None = None
        self._pid = 0
        self._exits = 0
        self._restart_at: float | None = None

    def begin(self) -> None:
        """Start it, and count its exits from zero; raise ``OSError`` when it cannot be started."""
        self._exits = 0
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs, (self._me.directory / f"{self._spec.name}.log").open("ab") as output:
                command, inherited = self._spec.command(theirs.fileno())
                descriptors = [theirs.fileno(), *inherited]
                self._pid = spawn(command, output, env={**os.environ, **self._me.marks()}, pass_fds=descriptors, cwd="/")
        except BaseException:
            ours.close()
            raise
        self._pids.add(self._pid)
        stream = self._stream = MessageStream(ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda mask: self._serve(stream, mask))
        self._spec.started()

    @property
    def is_alive(self) -> bool:
        """Return whether it runs, as far as is known."""
        return self._stream is not None

    def send(self, message: Message) -> None:
        """Send it *message*; while it does not run the message is lost."""
        stream = self._stream
        if stream is not None and stream.send(message):
            stream.wait_for(self._selector)
        elif stream is not None:
            self._lost(stream)

    def _serve(self, stream: MessageStream, mask: int) -> None:
        if stream is not self._stream:
            return
        if mask & selectors.EVENT_WRITE and not stream.drain():
            self._lost(stream)
            return
        stream.wait_for(self._selector)
        try:
            is_open = not mask & selectors.EVENT_READ or stream.read()
            while stream.received:
                self._spec.received(stream.received.popleft())
        except (BadLine, schema.BadField) as error:
            note(log, "sidecar.bad-message", name=self._spec.name, why=error)
            is_open = False
        if not is_open:
            self._lost(stream)

    def _lost(self, stream: MessageStream) -> None:
        """Schedule a restart, unless it has exited too often."""
        if stream is not self._stream:
            return
        self._stop()
        self._spec.exited()
        self._exits += 1
        note(log, "sidecar.exited", name=self._spec.name, exits=self._exits)
        if self._exits < MAX_EXITS:
            self._restart_at = time.monotonic() + PAUSE * self._exits
            return
        self._spec.given_up(f"it exited {self._exits} times; see {self._me.directory / (self._spec.name + '.log')}")

    def _stop(self) -> None:
        if self._stream is not None:
            self._selector.unregister(self._stream.socket)
            self._stream.socket.close()
            self._stream = None
            if self._pid in self._pids:  # not reaped yet: the number is its own
                kill(self._pid, signal.SIGKILL)

    def due(self) -> float | None:
        """Return when it is to be restarted (monotonic)."""
        return self._restart_at

    def tick(self, now: float) -> None:
        """Restart it when that is due."""
        if self._restart_at is None or now < self._restart_at:
            return
        self._restart_at = None
        try:
            self._start()
        except OSError as error:
            self._spec.given_up(f"it cannot be restarted: {error}")

    def end(self) -> None:
        """End it, without a restart."""
        self._stop()
        self._restart_at = None
