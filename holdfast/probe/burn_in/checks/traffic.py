"""Bytes between two nodes over TCP, both ways, each block compared with what it must be; latency and bandwidth with it.

One end serves one connection of whoever knows the token, and the other comes. Both tell what they received.
"""

from __future__ import annotations

import fcntl
import hashlib
import socket
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from detectors.burn_in_results import Check, CheckMark
from holdfast.authenticated_listener import NoAuthenticatedCaller, accept_authenticated, fill, open_port, taken

NAME: Final = "network"
BLOCK: Final = 1 << 20
PINGS: Final = 50
HEAD: Final = 8
SIOCGIFADDR: Final = 0x8915
"""Linux: asks an interface for its IPv4 address."""
MB: Final = 1e6


def serve(token: str, blocks: int, seconds: float, port: int, tell: Callable[[int], None]) -> Check:
    """Listen on *port* (0: any), *tell* which it is, and take part in one exchange."""
    begun = time.monotonic()
    with open_port(port) as server:
        tell(server.getsockname()[1])
        try:
            with accept_authenticated(server, token, begun + seconds) as sock:
                devices = interface_of(sock.getsockname()[0])
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(PINGS):
                    sock.sendall(taken(sock, 1))
                wrong = _received(sock, token, blocks, begun + seconds)
                sock.sendall(b"k")  # all has arrived: who sent it may stop its clock
                _sent(sock, token, blocks, begun + seconds)
                taken(sock, 1)
        except NoAuthenticatedCaller as error:  # strangers may have, or the other end did not start: that says nothing of this node
            return Check(name=NAME, mark=CheckMark.SKIPPED, words=str(error), seconds=time.monotonic() - begun)
        except OSError as error:
            return _broken(error, begun)
    return _told(wrong, {}, begun, devices)


def send(token: str, blocks: int, seconds: float, host: str, port: int) -> Check:
    """Go to the node that serves, measure the way there and back, and exchange *blocks* in both directions."""
    begun = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=seconds) as sock:
            devices = interface_of(sock.getsockname()[0])
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(token.encode())
            latency = _latency(sock)
            at = time.monotonic()
            _sent(sock, token, blocks, begun + seconds)
            taken(sock, 1)
            there = time.monotonic() - at
            at = time.monotonic()
            wrong = _received(sock, token, blocks, begun + seconds)
            back = time.monotonic() - at
            sock.sendall(b"k")
    except OSError as error:
        return _broken(error, begun)
    size = blocks * BLOCK / MB
    figures = {
        "sent MB/s": size / max(there, 1e-6),
        "received MB/s": size / max(back, 1e-6),
        "round trip ms": 1000 * latency,
        "MB": 2 * size,
    }
    return _told(wrong, figures, begun, devices)


def interface_of(address: str) -> tuple[str, ...]:
    """Return the interface that has *address*, its PCI address and its RDMA device; nothing where that is not known."""
    address = address.removeprefix("::ffff:")  # IPv4 at a socket that takes both
    for folder in sorted(Path("/sys/class/net").glob("*")):
        if address in _addresses(folder.name):
            device = folder / "device"
            bus = [device.resolve().name] if device.exists() else []
            return (folder.name, *bus, *(one.name for one in sorted(device.glob("infiniband/*"))))
    return ()


def _addresses(interface: str) -> list[str]:
    """Return the first IPv4 address and the IPv6 addresses of an interface."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
        told = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(told[20:24]))
    with suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == interface]
    return found


def _latency(sock: socket.socket) -> float:
    times = []
    for number in range(PINGS):
        at = time.monotonic()
        sock.sendall(bytes([number]))
        taken(sock, 1)
        times.append(time.monotonic() - at)
    return statistics.median(times)


def _body(token: str) -> bytes:
    """Return what both ends know without having sent it: bytes that no device could make up or compress."""
    return hashlib.shake_128(token.encode()).digest(BLOCK - HEAD)


def _sent(sock: socket.socket, token: str, blocks: int, until: float) -> None:
    body = _body(token)
    for number in range(blocks):
        _refuse_after(until, number, blocks)
        sock.sendall(number.to_bytes(HEAD, "little") + body)


def _refuse_after(until: float, number: int, blocks: int) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"only {number} of {blocks} blocks of 1 MiB came through in time")


def _received(sock: socket.socket, token: str, blocks: int, until: float) -> str:
    """Take all blocks; return what was wrong with the first that was not as it must be."""
    wrong, body, room = "", _body(token), bytearray(BLOCK)
    for number in range(blocks):
        _refuse_after(until, number, blocks)
        fill(sock, memoryview(room))
        wanted = number.to_bytes(HEAD, "little") + body
        if not wrong and room != wanted:
            place = next(place for place in range(BLOCK) if room[place] != wanted[place])
            wrong = f"byte {place} of block {number} of {blocks} arrived as {room[place]:#04x}, and was sent as {wanted[place]:#04x}"
    return wrong


def _broken(error: OSError, begun: float) -> Check:
    words = str(error.strerror or error)
    words = "nothing came in time" if words == "timed out" else words
    return Check(name=NAME, mark=CheckMark.FAILED, words=words, seconds=time.monotonic() - begun)


def _told(wrong: str, figures: dict[str, float], begun: float, devices: tuple[str, ...]) -> Check:
    mark, words = (CheckMark.FAILED, wrong) if wrong else (CheckMark.PASSED, "every byte arrived as it was sent")
    return Check(name=NAME, mark=mark, words=words, figures=figures, seconds=time.monotonic() - begun, devices=devices)
