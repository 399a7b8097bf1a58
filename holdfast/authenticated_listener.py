"""Ports that other machines call, by IPv4 or IPv6, and one caller that shows a token; others are sent away. Standard library only."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

TOKEN_SECONDS: Final = 2.0
"""Seconds that a caller may take to show the whole token; others are heard meanwhile."""
MOST: Final = 32
"""Strangers that are borne with for so long."""
GRACE: Final = 0.5
"""Seconds that they have while there are more: a thousand ranks that come at once, from busy machines, are no strangers a moment later."""
BURST: Final = 256
"""Strangers that are borne with for a moment: with one more the oldest is hung up on."""


class NoAuthenticatedCaller(TimeoutError):
    """Nobody who knows the token came in time; whether the way there is sound nobody knows either."""


Stranger = TypeVar("Stranger")


class PendingCallers(Generic[Stranger]):
    """Who has not proved yet that it may come in, the oldest first, and which of them have had their time."""

    def __init__(self) -> None:
        self._since: dict[Stranger, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[Stranger]:
        return iter(list(self._since))

    def add(self, one: Stranger) -> None:
        """Note one who has just come."""
        self._since[one] = time.monotonic()

    def discard(self, one: Stranger) -> None:
        """Forget one who has gone, or is no stranger any more."""
        self._since.pop(one, None)

    def late(self, most: int, seconds: float) -> list[Stranger]:
        """Return whom to hang up on: who has been here for so many *seconds*, or a moment while there are more than *most*."""
        now, found = time.monotonic(), list[Stranger]()
        for place, (one, since) in enumerate(self._since.items()):
            patience = GRACE if place < len(self._since) - most else seconds
            if place >= len(self._since) - BURST and now - since < min(patience, seconds):
                break
            found.append(one)
        return found

    def due(self, most: int, seconds: float) -> float | None:
        """Return in how many seconds somebody will be late; None while nobody is here."""
        for since in self._since.values():
            return max(0.0, since + (min(GRACE, seconds) if len(self._since) > most else seconds) - time.monotonic())
        return None


@dataclass(slots=True, eq=False)
class _PendingCaller:
    """One who has not shown the token yet, and what it has shown so far."""

    socket: socket.socket
    shown: bytearray = field(default_factory=bytearray)


def open_port(port: int = 0, *, backlog: int | None = None) -> socket.socket:
    """Listen on all addresses, as nobody here knows by which one callers come; 0: on any port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def accept_authenticated(server: socket.socket, token: str, until: float) -> socket.socket:
    """Return the connection of who shows the token until then (monotonic), and its time limit is then too.

    All callers are heard at once: one that says nothing, or a byte now and then, keeps nobody else waiting, and not us beyond *until*.
    Raise `NoAuthenticatedCaller` when none of them knows the token.
    """
    found = _Hall(server, token.encode()).wait(until)
    found.settimeout(max(0.01, until - time.monotonic()))
    return found


class _Hall:
    """Where callers wait to be let in."""

    def __init__(self, server: socket.socket, token: bytes) -> None:
        self._server, self._token = server, token
        self._callers = PendingCallers[_PendingCaller]()
        self._selector = selectors.DefaultSelector()

    def wait(self, until: float) -> socket.socket:
        """Return the connection of who shows the token; all others are hung up on."""
        self._server.settimeout(0)
        self._selector.register(self._server, selectors.EVENT_READ)
        try:
            while (now := time.monotonic()) < until:
                due = self._callers.due(MOST, TOKEN_SECONDS)
                for key, _ in self._selector.select(until - now if due is None else min(due, until - now)):
                    if key.data is None:
                        self._let_in()
                    elif self._knows(key.data):
                        self._selector.unregister(key.data.socket)
                        self._callers.discard(key.data)
                        return key.data.socket  # type: ignore[no-any-return]
                for late in self._callers.late(MOST, TOKEN_SECONDS):
                    self._send_away(late)
            raise NoAuthenticatedCaller("nobody who knows the token came in time")
        finally:
            for caller in self._callers:
                self._send_away(caller)
            self._selector.close()

    def _let_in(self) -> None:
        try:
            sock, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or the caller is gone already
            time.sleep(0.01)
            for caller in self._callers:
                self._send_away(caller)
            return
        caller = _PendingCaller(sock)
        try:
            sock.settimeout(0)
            self._selector.register(sock, selectors.EVENT_READ, caller)
        except OSError:
            sock.close()
        else:
            self._callers.add(caller)

    def _knows(self, caller: _PendingCaller) -> bool:
        """Take in what a caller shows; tell whether it is the token. Who shows something else is sent away."""
        if caller.socket.fileno() < 0:  # sent away in this very round
            return False
        try:
            data = caller.socket.recv(len(self._token) - len(caller.shown))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        caller.shown += data
        if len(caller.shown) == len(self._token) and hmac.compare_digest(bytes(caller.shown), self._token):
            return True
        if not data or len(caller.shown) == len(self._token):
            self._send_away(caller)
        return False

    def _send_away(self, caller: _PendingCaller) -> None:
        self._callers.discard(caller)
        if caller.socket.fileno() >= 0:
            self._selector.unregister(caller.socket)
            caller.socket.close()


def taken(sock: socket.socket, size: int) -> bytes:
    """Return so many bytes from *sock*; raise ``OSError`` when it ends before."""
    room = bytearray(size)
    fill(sock, memoryview(room))
    return bytes(room)


def fill(sock: socket.socket, room: memoryview) -> None:
    """Take bytes from *sock* until *room* is full; raise ``OSError`` when it ends before."""
    while room:
        got = sock.recv_into(room)
        if not got:
            raise ConnectionError("the other end closed the connection")
        room = room[got:]
