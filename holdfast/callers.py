"""Ports that other machines call, by IPv4 or IPv6, and one caller that shows a token; others are sent away. Standard library only."""

from __future__ import annotations

import hmac
import socket
import time
from typing import Final

KNOCK: Final = 2.0
"""Seconds that a caller may take to show the token, before the next one is let in."""


def open_port(port: int = 0, *, backlog: int | None = None) -> socket.socket:
    """Listen on all addresses, as nobody here knows by which one callers come; 0: on any port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def admitted(server: socket.socket, token: str, until: float) -> socket.socket:
    """Return the connection of who shows the token until then (monotonic), and its time limit is then too.

    Raise ``OSError`` when nobody does.
    """
    while True:
        server.settimeout(max(0.01, until - time.monotonic()))
        sock, _ = server.accept()
        sock.settimeout(max(0.01, min(KNOCK, until - time.monotonic())))
        try:
            if hmac.compare_digest(taken(sock, len(token)), token.encode()):
                sock.settimeout(max(0.01, until - time.monotonic()))
                return sock
        except OSError:
            pass  # a stranger that says nothing is no trouble of the network
        sock.close()


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
