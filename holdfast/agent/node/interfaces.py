"""The network interfaces of this machine, and how much goes through one. Standard library only."""

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

from holdfast.authenticated_listener import accept_authenticated, open_port, taken

SIOCGIFADDR: Final = 0x8915
SIOCGIFNETMASK: Final = 0x891B
INET6: Final = Path("/proc/net/if_inet6")
GLOBAL: Final = "00"
"""Scope of an address that other machines can reach, in /proc/net/if_inet6."""
BLOCK: Final = 1 << 20
CONNECTS: Final = 10.0
"""Seconds that a connection to another node may take: who asks waits longer, and hears that it was this that failed."""
LISTENS: Final = 30.0
"""Seconds that a node waits to be measured."""
SIZE: Final = 8
"""Bytes of the number that ends a measurement."""
MOST_MEASURED: Final = 4 << 30
"""Bytes after which a measurement is over, however long it was to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One address of an interface."""

    name: str
    address: str
    network: str
    """The network in which the address lies, with its prefix length."""
    speed: int | None = None
    """Mbit/s, as the driver says."""


def interfaces() -> list[Interface]:
    """Return the addresses under which other machines may reach this one, loopback and link-local ones aside."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                address, mask = _asked(sock, name, SIOCGIFADDR), _asked(sock, name, SIOCGIFNETMASK)
                found.append(_interface(name, address, mask))
    with suppress(OSError):
        for line in INET6.read_text().splitlines():
            digits, _, length, scope, _, name = line.split()
            if scope == GLOBAL:
                found.append(_interface(name, str(ipaddress.IPv6Address(int(digits, 16))), str(int(length, 16))))
    return [one for one in found if not ipaddress.ip_address(one.address).is_loopback]


def _asked(sock: socket.socket, name: str, what: int) -> str:
    answer = fcntl.ioctl(sock.fileno(), what, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _interface(name: str, address: str, mask: str) -> Interface:
    network = ipaddress.ip_interface(f"{address}/{mask}").network
    speed = None
    with suppress(OSError, ValueError):  # a virtual one has none
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    return Interface(name=name, address=address, network=str(network), speed=speed if speed is not None and speed > 0 else None)


def listening() -> dict[str, Any]:
    """Wait for one measurement, in a thread of its own; return the port, and the token that whoever measures shows first."""
    server, token = open_port(), secrets.token_hex(16)
    threading.Thread(target=_swallow, args=(server, token), name="bandwidth", daemon=True).start()
    return {"port": server.getsockname()[1], "token": token}


def meet(host: str, port: int, seconds: float, source: str | None = None) -> dict[str, Any]:
    """Try to connect to who listens at *host* and *port*; say why that does not come about within *seconds*, or nothing."""
    try:
        socket.create_connection((host, port), timeout=seconds, source_address=(source, 0) if source else None).close()
    except OSError as error:
        return {"why": error.strerror or f"{error} after {seconds:g} s"}
    return {"why": ""}


def _swallow(server: socket.socket, token: str) -> None:
    with server, suppress(OSError), accept_authenticated(server, token, time.monotonic() + LISTENS) as sock:
        sock.settimeout(LISTENS)
        buffer, arrived = bytearray(BLOCK), 0
        while (got := sock.recv_into(buffer)) and arrived < MOST_MEASURED:
            arrived += got
        sock.sendall(arrived.to_bytes(SIZE, "big"))


def bandwidth_to(host: str, port: int, token: str, seconds: float, source: str | None = None) -> dict[str, Any]:
    """Show *token* to who listens at *host* and *port*, and send for so many seconds; return the bytes that arrived, and the seconds.

    Raise ``OSError`` when the way is closed.
    """
    block = bytes(BLOCK)
    with socket.create_connection((host, port), timeout=CONNECTS, source_address=(source, 0) if source else None) as sock:
        sock.settimeout(seconds + LISTENS)
        sock.sendall(token.encode())
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        arrived = int.from_bytes(taken(sock, SIZE), "big")
        return {"bytes": arrived, "seconds": time.monotonic() - begun}
