"""Changes of network links as the kernel tells them to who listens: rtnetlink(7), without asking."""

from __future__ import annotations

import socket
from typing import Final

LINK_CHANGES: Final = 1
"""The multicast group of changes of links (RTMGRP_LINK)."""


def hear_links() -> socket.socket | None:
    """Return a socket that becomes readable when a link changes; None where there is no such thing."""
    try:
        heard = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        heard.bind((0, LINK_CHANGES))
    except (OSError, AttributeError):
        return None
    return heard


def drain(heard: socket.socket) -> bool:
    """Throw away what has come, whatever it says; tell whether there was anything. Too much at once (ENOBUFS) is something too."""
    some = False
    while True:
        try:
            heard.recv(1 << 16)
        except BlockingIOError:
            return some
        except OSError:
            return True
        some = True
