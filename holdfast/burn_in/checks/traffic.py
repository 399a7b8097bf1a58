"""Bytes between two nodes over TCP, both ways, each block compared with what it must be; latency and bandwidth with it.

One end serves one connection of whoever knows the token, and the other comes. Both tell what they received.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import statistics
import time
from collections.abc import Callable
from typing import Final

from detectors.trials import Check, Mark

NAME: Final = "network"
BLOCK: Final = 1 << 20
PINGS: Final = 50
TOKEN: Final = 32
HEAD: Final = 8
MB: Final = 1e6


def serve(token: str, blocks: int, seconds: float, port: int, tell: Callable[[int], None]) -> Check:
    """Listen on *port* (0: any), *tell* which it is, and take part in one exchange."""
    begun = time.monotonic()
    with _listening(port) as server:
        tell(server.getsockname()[1])
        try:
            with _accepted(server, token, begun + seconds) as sock:
                for _ in range(PINGS):
                    sock.sendall(_taken(sock, 1))
                wrong = _received(sock, token, blocks, begun + seconds)
                sock.sendall(b"k")  # all has arrived: who sent it may stop its clock
                _sent(sock, token, blocks, begun + seconds)
                _taken(sock, 1)
        except OSError as error:
            return _broken(error, begun)
    return _told(wrong, {}, begun)


def send(token: str, blocks: int, seconds: float, host: str, port: int) -> Check:
    """Go to the node that serves, measure the way there and back, and exchange *blocks* in both directions."""
    begun = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=seconds) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(token.encode())
            latency = _latency(sock)
            at = time.monotonic()
            _sent(sock, token, blocks, begun + seconds)
            _taken(sock, 1)
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
    return _told(wrong, figures, begun)


def _listening(port: int) -> socket.socket:
    """Listen on all addresses, as nobody here knows by which one the other end comes."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _accepted(server: socket.socket, token: str, until: float) -> socket.socket:
    """Return the connection of who knows the token; others are sent away."""
    while True:
        server.settimeout(max(0.01, until - time.monotonic()))
        sock, _ = server.accept()
        sock.settimeout(max(0.01, until - time.monotonic()))
        try:
            if hmac.compare_digest(_taken(sock, len(token)), token.encode()):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
        except OSError:
            pass  # a stranger that says nothing is no trouble of the network
        sock.close()


def _latency(sock: socket.socket) -> float:
    taken = []
    for number in range(PINGS):
        at = time.monotonic()
        sock.sendall(bytes([number]))
        _taken(sock, 1)
        taken.append(time.monotonic() - at)
    return statistics.median(taken)


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
        _fill(sock, memoryview(room))
        wanted = number.to_bytes(HEAD, "little") + body
        if not wrong and room != wanted:
            place = next(place for place in range(BLOCK) if room[place] != wanted[place])
            wrong = f"byte {place} of block {number} of {blocks} arrived as {room[place]:#04x}, and was sent as {wanted[place]:#04x}"
    return wrong


def _fill(sock: socket.socket, room: memoryview) -> None:
    while room:
        count = sock.recv_into(room)
        if not count:
            raise ConnectionError("the other end closed the connection")
        room = room[count:]


def _taken(sock: socket.socket, count: int) -> bytes:
    room = bytearray(count)
    _fill(sock, memoryview(room))
    return bytes(room)


def _broken(error: OSError, begun: float) -> Check:
    words = str(error.strerror or error)
    words = "nothing came in time" if words == "timed out" else words
    return Check(name=NAME, mark=Mark.FAILED, words=words, seconds=time.monotonic() - begun)


def _told(wrong: str, figures: dict[str, float], begun: float) -> Check:
    mark, words = (Mark.FAILED, wrong) if wrong else (Mark.PASSED, "every byte arrived as it was sent")
    return Check(name=NAME, mark=mark, words=words, figures=figures, seconds=time.monotonic() - begun)
