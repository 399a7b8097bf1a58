"""Listen on ports by IPv4 and IPv6, and accept the one client that sends a token; others are disconnected. Standard library only."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

TOKEN_SECONDS: Final = 2.0
"""Seconds that a client may take to send the whole token; others are read meanwhile."""
MAX_PENDING: Final = 32
"""Unauthenticated clients that get the full time."""
GRACE: Final = 0.5
"""Seconds that the oldest get while there are more: a thousand ranks of busy machines may connect at once."""
BURST: Final = 256
"""Unauthenticated clients at most: with one more the oldest is disconnected."""


class NoAuthenticatedCaller(TimeoutError):
    """No client sent the token in time; whether the network works is not known either."""


Pending = TypeVar("Pending")


class PendingCallers(Generic[Pending]):
    """Clients that have not authenticated yet, the oldest first, and which of them have used up their time."""

    def __init__(self) -> None:
        self._since: dict[Pending, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._since))

    def add(self, one: Pending) -> None:
        """Add a client that has just connected."""
        self._since[one] = time.monotonic()

    def discard(self, one: Pending) -> None:
        """Remove a client that has disconnected or authenticated."""
        self._since.pop(one, None)

    def late(self, most: int, seconds: float) -> list[Pending]:
        """Return the clients to disconnect: connected for so many *seconds*, or for `GRACE` while there are more than *most*."""
        now, found = time.monotonic(), list[Pending]()
        for place, (one, since) in enumerate(self._since.items()):
            patience = GRACE if place < len(self._since) - most else seconds
            if place >= len(self._since) - BURST and now - since < min(patience, seconds):
                break
            found.append(one)
        return found

    def due(self, most: int, seconds: float) -> float | None:
        """Return in how many seconds a client will be late; None while there is none."""
        for since in self._since.values():
            return max(0.0, since + (min(GRACE, seconds) if len(self._since) > most else seconds) - time.monotonic())
        return None


@dataclass(slots=True, eq=False)
class _PendingCaller:
    """A client that has not sent the token yet, and what it has sent."""

    socket: socket.socket
    sent: bytearray = field(default_factory=bytearray)


def open_port(port: int = 0, *, backlog: int | None = None) -> socket.socket:
    """Listen on all addresses, as the ones that clients use are not known here; 0: on any port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def accept_authenticated(server: socket.socket, token: str, until: float) -> socket.socket:
    """Return the connection of the client that sends the token until then (monotonic); its timeout ends then too.

    All clients are read at once: one that sends nothing, or a byte now and then, delays no other one, and not the caller beyond *until*.
    Raise `NoAuthenticatedCaller` when none sends the token.
    """
    found = _Acceptor(server, token.encode()).wait(until)
    found.settimeout(max(0.01, until - time.monotonic()))
    return found


class _Acceptor:
    """The clients that wait to be accepted."""

    def __init__(self, server: socket.socket, token: bytes) -> None:
        self._server, self._token = server, token
        self._callers = PendingCallers[_PendingCaller]()
        self._selector = selectors.DefaultSelector()

    def wait(self, until: float) -> socket.socket:
        """Return the connection of the client that sends the token; disconnect all others."""
        self._server.settimeout(0)
        self._selector.register(self._server, selectors.EVENT_READ)
        try:
            while (now := time.monotonic()) < until:
                due = self._callers.due(MAX_PENDING, TOKEN_SECONDS)
                for key, _ in self._selector.select(until - now if due is None else min(due, until - now)):
                    if key.data is None:
                        self._accept()
                    elif self._has_token(key.data):
                        self._selector.unregister(key.data.socket)
                        self._callers.discard(key.data)
                        return key.data.socket  # type: ignore[no-any-return]
                for late in self._callers.late(MAX_PENDING, TOKEN_SECONDS):
                    self._disconnect(late)
            raise NoAuthenticatedCaller("no client sent the token in time")
        finally:
            for caller in self._callers:
                self._disconnect(caller)
            self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or the client has disconnected already
            time.sleep(0.01)
            for caller in self._callers:
                self._disconnect(caller)
            return
        caller = _PendingCaller(sock)
        try:
            sock.settimeout(0)
            self._selector.register(sock, selectors.EVENT_READ, caller)
        except OSError:
            sock.close()
        else:
            self._callers.add(caller)

    def _has_token(self, caller: _PendingCaller) -> bool:
        """Read from a client; return whether it has sent the token. One that sends something else is disconnected."""
        if caller.socket.fileno() < 0:  # disconnected in this very round
            return False
        try:
            data = caller.socket.recv(len(self._token) - len(caller.sent))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        caller.sent += data
        if len(caller.sent) == len(self._token) and hmac.compare_digest(bytes(caller.sent), self._token):
            return True
        if not data or len(caller.sent) == len(self._token):
            self._disconnect(caller)
        return False

    def _disconnect(self, caller: _PendingCaller) -> None:
        self._callers.discard(caller)
        if caller.socket.fileno() >= 0:
            self._selector.unregister(caller.socket)
            caller.socket.close()


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Return so many bytes from *sock*; raise ``OSError`` when it closes before."""
    buffer = bytearray(size)
    receive_into(sock, memoryview(buffer))
    return bytes(buffer)


def receive_into(sock: socket.socket, buffer: memoryview) -> None:
    """Read bytes from *sock* until *buffer* is full; raise ``OSError`` when it closes before."""
    while buffer:
        got = sock.recv_into(buffer)
        if not got:
            raise ConnectionError("the other end closed the connection")
        buffer = buffer[got:]
