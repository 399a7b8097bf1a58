"""The agent's end of its node's memory server: the process started, told what to do, heard, and started again when it dies.

The agent holds the port. A server that comes after one that died listens on the same one, and who knocks in between waits a moment.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast import vault
from holdfast.agent import fields
from holdfast.agent.identity import Identity
from holdfast.agent.line import Line
from holdfast.agent.starter import spawn
from holdfast.log import note
from holdfast.ports import free_port
from holdfast.process import kill, mark_of
from holdfast.wire import BadLine, Message

log = logging.getLogger("holdfast.agent")

MOST_SERVERS: Final = 10
"""Servers that one agent starts again; after that the node's memory is its own."""
PAUSE: Final = 0.5
"""Seconds before a server is started again."""
BACKLOG: Final = 64
TOLD: Final = frozenset({"memory.full", "memory.fits", "replica.lost", "replica.kept"})
"""What a server may tell the flow."""


class VaultServer:
    """The process that serves this node's vault to other nodes."""

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], helpers: set[int]) -> None:
        self._me, self._selector, self._emit, self._helpers = me, selector, emit, helpers
        self.homes: list[tuple[str, int]] = []
        """Where the snapshots of this node's ranks are copied to."""
        self.replicas: dict[str, int] = {}
        """Rank to the newest step of which one of them is known to have a whole replica."""
        self._orders: Message = {}
        self._facts: Message = {}
        self._listening: socket.socket | None = None
        self._line: Line | None = None
        self._pid = 0
        self._lost = 0
        self._again_at: float | None = None

    @property
    def port(self) -> int | None:
        """Return the port on which other nodes reach the server; None when there is none."""
        return None if self._listening is None else int(self._listening.getsockname()[1])

    def begin(self, place: Path, address: str, limit: int, token: str) -> None:
        """Serve the vault at *place* under *address*; one that is served already goes on so. Raise ``OSError`` when that cannot be."""
        facts = {"vault": str(place), "limit": limit, "token": token, "node": vault.key_of(mark_of(self._me.directory)), "address": address}
        if self._listening is not None and facts == self._facts:
            return
        self.end()
        self._facts, self._lost = facts, 0
        self._listening = _listen(address, place / "port")
        try:
            self._start()
        except OSError:
            self.end()
            raise

    def _start(self) -> None:
        assert self._listening is not None
        ours, theirs = socket.socketpair()
        argv = (sys.executable, "-m", "holdfast.agent.memory_server", str(theirs.fileno()), str(self._listening.fileno()))
        try:
            with theirs, (self._me.directory / "memory.log").open("ab") as output:
                passed = [theirs.fileno(), self._listening.fileno()]
                self._pid = spawn(argv, output, env={**os.environ, **self._me.marks()}, pass_fds=passed, cwd="/")
        except BaseException:
            ours.close()
            raise
        self._helpers.add(self._pid)
        line = self._line = Line(ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda mask: self._serve(line, mask))
        self._say(self._facts)
        if self._orders:
            self._say(self._orders)

    def replicate(self, homes: list[tuple[str, int]], bandwidth: int | None) -> None:
        """Tell the server where to copy the snapshots of this node's ranks."""
        if homes != self.homes:
            self.homes, self.replicas = homes, {}
        self._order({"replicate": [list(home) for home in homes], "bandwidth": bandwidth})

    def own(self, ranks: list[int]) -> None:
        """Tell the server which ranks are this node's."""
        if ranks != self._orders.get("ranks"):
            self._order({"ranks": ranks})

    def _order(self, message: Message) -> None:
        self._orders |= message
        if self._line is not None:
            self._say(message)

    def _say(self, message: Message) -> None:
        line = self._line
        if line is not None and line.send(message):
            self._watch(line)
        elif line is not None:
            self._gone(line)

    def _watch(self, line: Line) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        key = self._selector.get_key(line.socket)
        if key.events != events:
            self._selector.modify(line.socket, events, key.data)

    def _serve(self, line: Line, mask: int) -> None:
        if line is not self._line:
            return
        if mask & selectors.EVENT_WRITE and not line.drain():
            self._gone(line)
            return
        self._watch(line)
        try:
            going = not mask & selectors.EVENT_READ or line.read()
            while line.inbox:
                self._take(line.inbox.popleft())
        except (BadLine, fields.BadField) as error:
            note(log, "memory.garbage", why=error)
            going = False
        if not going:
            self._gone(line)

    def _take(self, message: Message) -> None:
        event = fields.text(message, "event")
        if event in TOLD:
            facts: dict[str, Any] = {name: fields.text(message, name) for name in ("why", "peer") if message.get(name) is not None}
            self._emit(event, **facts)
        elif event == "replicas":
            ranks = fields.mapping(message, "ranks")
            self.replicas = {rank: fields.whole(ranks, rank) for rank in ranks}

    def _gone(self, line: Line) -> None:
        """Start another server in a moment, unless too many have died."""
        if line is not self._line:
            return
        self._hang_up()
        self._lost += 1
        note(log, "memory.server-gone", lost=self._lost)
        if self._lost < MOST_SERVERS:
            self._again_at = time.monotonic() + PAUSE * self._lost
            return
        self.end()
        self._emit("memory.none", what="server", why=f"its server died {self._lost} times; see {self._me.directory / 'memory.log'}")

    def _hang_up(self) -> None:
        self.replicas = {}
        if self._line is not None:
            self._selector.unregister(self._line.socket)
            self._line.socket.close()
            self._line = None
            if self._pid in self._helpers:  # not reaped yet: the number is its own
                kill(self._pid, signal.SIGKILL)

    def due(self) -> float | None:
        """Return when another server is to be started (monotonic)."""
        return self._again_at

    def tick(self, now: float) -> None:
        """Start another server when it is time."""
        if self._again_at is None or now < self._again_at:
            return
        self._again_at = None
        try:
            self._start()
        except OSError as error:
            self.end()
            self._emit("memory.none", what="server", why=f"its server cannot be started again: {error}")

    def end(self) -> None:
        """End the server and give up its port."""
        self._hang_up()
        self._again_at = None
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._facts = {}


def _listen(address: str, remembered: Path) -> socket.socket:
    """Listen on a port of *address*: the one that the vault was served on before, for who knows only that, else any free one."""
    family, _, _, _, where = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    ports = [free_port() for _ in range(3)]
    with suppress(OSError, ValueError):
        ports.insert(0, int(remembered.read_text()))
    for number in ports:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((where[0], number, *where[2:]))
            sock.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            sock.close()
            last = error
            continue
        with suppress(OSError):
            remembered.write_text(str(number))
        return sock
    raise OSError(str(last)) from last
