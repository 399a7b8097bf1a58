"""Ports to listen on later, in another process: free now, and outside the range from which the kernel serves outgoing connections."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Final

FIRST_PORT: Final = 10_000
_TRIES: Final = 200


def free_port() -> int:
    """Return a port that is free now, and that no connection of anybody's will be given; raise ``OSError`` when there is none."""
    span = max(1000, _first_ephemeral() - FIRST_PORT)
    for _ in range(_TRIES):
        port = FIRST_PORT + int.from_bytes(os.urandom(4)) % span
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(errno.EADDRINUSE, "no free port found")


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
