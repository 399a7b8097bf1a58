"""The network interfaces of this machine, connections to other nodes, and their bandwidth. Standard library only."""

from __future__ import annotations

import fcntl
import ipaddress
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.security.authenticated_listener import accept_authenticated, open_port, receive_exactly

SIOCGIFADDR: Final = 0x8915
SIOCGIFNETMASK: Final = 0x891B
INET6: Final = Path("/proc/net/if_inet6")
GLOBAL_SCOPE: Final = "00"
"""Scope of an address that other machines can reach, in /proc/net/if_inet6."""
BLOCK: Final = 1 << 20
CONNECT_SECONDS: Final = 10.0
"""Seconds that a connection to another node may take: the controller waits longer, and so gets this failure."""
LISTEN_SECONDS: Final = 30.0
"""Seconds that a node waits for a measurement."""
SIZE: Final = 8
"""Bytes of the number that ends a measurement."""
MAX_MEASURED: Final = 4 << 30
"""Bytes after which a measurement ends, however long it was to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One address of an interface."""

    name: str
    address: str
    network: str
    """The network of the address, with its prefix length."""
    speed: int | None = None
    """Mbit/s, as the driver reports it."""


def interfaces() -> list[Interface]:
    """Return the addresses under which other machines may reach this one, without loopback and link-local ones."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no IPv4 address
                answers = [fcntl.ioctl(sock.fileno(), what, request)[20:24] for what in (SIOCGIFADDR, SIOCGIFNETMASK)]
                found.append(_interface(name, *map(socket.inet_ntoa, answers)))
    with suppress(OSError):
        for line in INET6.read_text().splitlines():
            digits, _, length, scope, _, name = line.split()
            if scope == GLOBAL_SCOPE:
                found.append(_interface(name, str(ipaddress.IPv6Address(int(digits, 16))), str(int(length, 16))))
    return [one for one in found if not ipaddress.ip_address(one.address).is_loopback]


def _interface(name: str, address: str, mask: str) -> Interface:
    network = ipaddress.ip_interface(f"{address}/{mask}").network
    speed = None
    with suppress(OSError, ValueError):  # a virtual one has none
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    return Interface(name=name, address=address, network=str(network), speed=speed if speed is not None and speed > 0 else None)


def check_connection(host: str, port: int, seconds: float, source: str | None = None) -> dict[str, Any]:
    """Try to connect to *host* and *port* within *seconds*; ``why`` in the answer says why that failed, or is empty."""
    try:
        socket.create_connection((host, port), timeout=seconds, source_address=(source, 0) if source else None).close()
    except OSError as error:
        return {"why": error.strerror or f"{error} after {seconds:g} s"}
    return {"why": ""}


def listen_for_measurement() -> dict[str, Any]:
    """Wait for one measurement in a thread; return the port, and the token that the measuring node sends first."""
    server, token = open_port(), secrets.token_hex(16)

    def receive() -> None:
        with server, suppress(OSError), accept_authenticated(server, token, time.monotonic() + LISTEN_SECONDS) as sock:
            sock.settimeout(LISTEN_SECONDS)
            buffer, arrived = bytearray(BLOCK), 0
            while (got := sock.recv_into(buffer)) and arrived < MAX_MEASURED:
                arrived += got
            sock.sendall(arrived.to_bytes(SIZE, "big"))

    threading.Thread(target=receive, name="bandwidth", daemon=True).start()
    return {"port": server.getsockname()[1], "token": token}


def bandwidth_to(host: str, port: int, token: str, seconds: float, source: str | None = None) -> dict[str, Any]:
    """Send data to a node that listens for a measurement for so many seconds; return the bytes that arrived, and the seconds.

    Raise ``OSError`` when there is no connection.
    """
    block = bytes(BLOCK)
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS, source_address=(source, 0) if source else None) as sock:
        sock.settimeout(seconds + LISTEN_SECONDS)
        sock.sendall(token.encode())
        begun = time.monotonic()
        sock.sendall(block)  # one at least, however late this process gets to it: a link over which nothing was sent would count as dead
        while time.monotonic() - begun < seconds:
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        arrived = int.from_bytes(receive_exactly(sock, SIZE), "big")
        return {"bytes": arrived, "seconds": time.monotonic() - begun}
