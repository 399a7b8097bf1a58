"""Ports to listen on later, in another process: free now, and outside the range from which the kernel serves outgoing connections."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

FIRST_PORT: Final = 10_000
_TRIES: Final = 200
_LISTEN: Final = "0A"


def free_port() -> int:
    """Return a port that is free now, and that the kernel gives to no outgoing connection; raise ``OSError`` when there is none."""
    span = max(1000, _first_ephemeral() - FIRST_PORT)
    for _ in range(_TRIES):
        port = FIRST_PORT + int.from_bytes(os.urandom(4)) % span
        if is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, "no free port found")


def is_free(port: int) -> bool:
    """Return whether *port* is free on all addresses now, by IPv4 and IPv6."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            if dual:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", port))
        except OSError:
            return False
        return True


def listens(pid: int, port: int) -> bool:
    """Return whether process *pid* itself listens on *port*: another one may have taken a port that was free a moment ago."""
    ours = {f"socket:[{inode}]" for name in ("tcp", "tcp6") for inode in _listening(Path(f"/proc/{pid}/net/{name}"), port)}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(entry.readlink()) in ours:
                    return True
    return False


def _listening(table: Path, port: int) -> Iterator[str]:
    """Yield the inodes of the sockets in *table* that listen on *port*; see proc_pid_net(5)."""
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
