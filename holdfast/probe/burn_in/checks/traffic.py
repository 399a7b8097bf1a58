"""Exchange blocks between two nodes over TCP in both directions, compare each, and measure latency and bandwidth.

One end accepts one connection of a client that knows the token, and the other connects. Both report what they received.
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

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.security.authenticated_listener import NoAuthenticatedCaller, accept_authenticated, open_port, receive_exactly, receive_into

NAME: Final = "network"
BLOCK: Final = 1 << 20
PINGS: Final = 50
HEAD: Final = 8
SIOCGIFADDR: Final = 0x8915
"""Linux: read the IPv4 address of an interface."""
MB: Final = 1e6


def serve(token: str, blocks: int, seconds: float, port: int, report: Callable[[int], None]) -> Check:
    """Listen on *port* (0: any), *report* which it is, and take part in one exchange."""
    begun = time.monotonic()
    with open_port(port) as server:
        report(server.getsockname()[1])
        try:
            with accept_authenticated(server, token, begun + seconds) as sock:
                devices = interface_of(sock.getsockname()[0])
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(PINGS):
                    sock.sendall(receive_exactly(sock, 1))
                wrong = _receive_blocks(sock, token, blocks, begun + seconds)
                sock.sendall(b"k")  # everything has arrived: the sender may stop its timer
                _send_blocks(sock, token, blocks, begun + seconds)
                receive_exactly(sock, 1)
        except NoAuthenticatedCaller as error:  # other clients may have, or the other end did not start: that says nothing about this node
            return Check(name=NAME, mark=CheckMark.SKIPPED, words=str(error), seconds=time.monotonic() - begun)
        except OSError as error:
            return _failed(error, begun)
    return _check(wrong, {}, begun, devices)


def send(token: str, blocks: int, seconds: float, host: str, port: int) -> Check:
    """Connect to the node that serves, measure the round trip, and exchange *blocks* in both directions."""
    begun = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=seconds) as sock:
            devices = interface_of(sock.getsockname()[0])
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(token.encode())
            latency = _latency(sock)
            at = time.monotonic()
            _send_blocks(sock, token, blocks, begun + seconds)
            receive_exactly(sock, 1)
            sent = time.monotonic() - at
            at = time.monotonic()
            wrong = _receive_blocks(sock, token, blocks, begun + seconds)
            received = time.monotonic() - at
            sock.sendall(b"k")
    except OSError as error:
        return _failed(error, begun)
    size = blocks * BLOCK / MB
    figures = {
        "sent MB/s": size / max(sent, 1e-6),
        "received MB/s": size / max(received, 1e-6),
        "round trip ms": 1000 * latency,
        "MB": 2 * size,
    }
    return _check(wrong, figures, begun, devices)


def interface_of(address: str) -> tuple[str, ...]:
    """Return the interface that has *address*, its PCI address and its RDMA devices; nothing where that is unknown."""
    address = address.removeprefix("::ffff:")  # IPv4 at a socket for both
    for folder in sorted(Path("/sys/class/net").glob("*")):
        if address in _addresses(folder.name):
            device = folder / "device"
            bus = [device.resolve().name] if device.exists() else []
            return (folder.name, *bus, *(one.name for one in sorted(device.glob("infiniband/*"))))
    return ()


def _addresses(interface: str) -> list[str]:
    """Return the first IPv4 address and the IPv6 addresses of an interface."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
        answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == interface]
    return found


def _latency(sock: socket.socket) -> float:
    times = []
    for number in range(PINGS):
        at = time.monotonic()
        sock.sendall(bytes([number]))
        receive_exactly(sock, 1)
        times.append(time.monotonic() - at)
    return statistics.median(times)


def _body(token: str) -> bytes:
    """Return bytes that both ends can compute from the token, and that no device can compress."""
    return hashlib.shake_128(token.encode()).digest(BLOCK - HEAD)


def _send_blocks(sock: socket.socket, token: str, blocks: int, until: float) -> None:
    body = _body(token)
    for number in range(blocks):
        _check_time(until, number, blocks)
        sock.sendall(number.to_bytes(HEAD, "little") + body)


def _check_time(until: float, number: int, blocks: int) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"only {number} of {blocks} blocks of 1 MiB arrived in time")


def _receive_blocks(sock: socket.socket, token: str, blocks: int, until: float) -> str:
    """Receive all blocks; return what was wrong with the first damaged one, or nothing."""
    wrong, body, buffer = "", _body(token), bytearray(BLOCK)
    for number in range(blocks):
        _check_time(until, number, blocks)
        receive_into(sock, memoryview(buffer))
        wanted = number.to_bytes(HEAD, "little") + body
        if not wrong and buffer != wanted:
            place = next(place for place in range(BLOCK) if buffer[place] != wanted[place])
            wrong = f"byte {place} of block {number} of {blocks} arrived as {buffer[place]:#04x}, but was sent as {wanted[place]:#04x}"
    return wrong


def _failed(error: OSError, begun: float) -> Check:
    words = str(error.strerror or error)
    words = "no data arrived in time" if words == "timed out" else words
    return Check(name=NAME, mark=CheckMark.FAILED, words=words, seconds=time.monotonic() - begun)


def _check(wrong: str, figures: dict[str, float], begun: float, devices: tuple[str, ...]) -> Check:
    mark, words = (CheckMark.FAILED, wrong) if wrong else (CheckMark.PASSED, "every byte arrived as it was sent")
    return Check(name=NAME, mark=mark, words=words, figures=figures, seconds=time.monotonic() - begun, devices=devices)
