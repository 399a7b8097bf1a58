"""The agent's end of its node's memory server: a helper that is told what to serve, and heard.

The agent holds the port. A server that comes after one that died listens on the same one, and who knocks in between waits a moment.
"""

from __future__ import annotations

import selectors
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast.agent import schema
from holdfast.agent.node.identity import Identity
from holdfast.agent.sidecar import Sidecar, SidecarSpec
from holdfast.memstore import store_folders
from holdfast.ports import free_port
from holdfast.process import mark_of
from holdfast.protocol import Message

BACKLOG: Final = 64
TOLD: Final = frozenset({"memstore.full", "memstore.has-room", "replica.lost", "replica.restored"})
"""What a server may tell the flow."""


class MemstoreServerClient:
    """The process that serves this node's memory store to other nodes."""

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], helpers: set[int]) -> None:
        self._me, self._emit = me, emit
        self.homes: list[tuple[str, int]] = []
        """Where the snapshots of this node's ranks are copied to."""
        self.replicas: dict[str, int] = {}
        """Rank to the newest step of which one of them is known to have a whole replica."""
        self._orders: Message = {}
        self._facts: Message = {}
        self._listening: socket.socket | None = None
        part = SidecarSpec(
            name="memory", command=self._command, begun=self._begun, heard=self._take, lost=self._lost, given_up=self._given_up
        )
        self._helper = Sidecar(part, me, selector, helpers)

    @property
    def port(self) -> int | None:
        """Return the port on which other nodes reach the server; None when there is none."""
        return None if self._listening is None else int(self._listening.getsockname()[1])

    def begin(self, place: Path, address: str, limit: int, token: str) -> None:
        """Serve the store at *place* under *address*; one that is served already goes on so. Raise ``OSError`` when that cannot be."""
        facts = {
            "vault": str(place),
            "limit": limit,
            "token": token,
            "node": store_folders.key_of(mark_of(self._me.directory)),
            "address": address,
        }
        if self._listening is not None and facts == self._facts:
            return
        self.end()
        self._facts = facts
        self._listening = _listen(address, place / "port")
        try:
            self._helper.begin()
        except OSError:
            self.end()
            raise

    def _command(self, line: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        assert self._listening is not None
        listening = self._listening.fileno()
        return (sys.executable, "-m", "holdfast.agent.memstore.server", str(line), str(listening)), (listening,)

    def _lost(self) -> None:
        self.replicas = {}

    def _begun(self) -> None:
        self._helper.say(self._facts)
        if self._orders:
            self._helper.say(self._orders)

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
        self._helper.say(message)

    def _take(self, message: Message) -> None:
        event = schema.text(message, "event")
        if event in TOLD:
            facts: dict[str, Any] = {name: schema.text(message, name) for name in ("why", "peer") if message.get(name) is not None}
            self._emit(event, **facts)
        elif event == "replicas":
            ranks = schema.mapping(message, "ranks")
            self.replicas = {rank: schema.whole(ranks, rank) for rank in ranks}

    def _given_up(self, why: str) -> None:
        self.end()
        self._emit("memstore.unavailable", what="server", why=f"its server: {why}")

    def due(self) -> float | None:
        """Return when another server is to be started (monotonic)."""
        return self._helper.due()

    def tick(self, now: float) -> None:
        """Start another server when it is time."""
        self._helper.tick(now)

    def end(self) -> None:
        """End the server and give up its port."""
        self._helper.end()
        self.replicas = {}
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._facts = {}


def _listen(address: str, remembered: Path) -> socket.socket:
    """Listen on a port of *address*: the one that the memory store was served on before, for who knows only that, else any free one."""
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
