"""The connection between a memory server and who asks it: the frames of messages and snapshots, and the proof of knowing the job's token.

Both sides prove that they know the token (HMAC-SHA256 over both sides' random numbers) before anything else is said. Then each message is
a length and JSON, and bytes of snapshots follow as they are. Nothing is unpickled, and every length has a bound.
Standard library only: the server, the command line and training processes all use it.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Self

HELLO: Final = b"HFMEMRY1"
NONCE: Final = 32
PROOF: Final = 32
LONGEST_MESSAGE: Final = 8 * 2**20
"""Bytes of JSON: the labels of some ten thousand snapshots."""
LONGEST_TAIL: Final = 2**30
"""Bytes of a snapshot's tail: it is held in memory for a moment."""

FRAME: Final = struct.Struct("<cQ")
DATA, TAIL, ABANDON = b"D", b"T", b"A"
"""Kinds of frames of a replica: bytes in the order of the file; the sealed label, followed by the tail; nothing more comes of it."""
LONGEST_FRAME: Final = 64 * 2**20
_LENGTH: Final = struct.Struct("<I")


class MemstoreConnection:
    """A connection between two that know the same token."""

    def __init__(self, sock: socket.socket, *, seconds: float) -> None:
        """Take over *sock*; an operation on which nothing moves for *seconds* raises ``TimeoutError``."""
        self.socket = sock
        self.until: float | None = None
        """When all that is awaited must have come (monotonic); None: as long as something moves."""
        sock.settimeout(seconds)
        _keep_alive(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    # -- who is there -------------------------------------------------------------------------------------------------

    def ask_in(self, token: str) -> None:
        """Prove as a client that we know *token*, and see that the server does; raise ``PermissionError`` when it does not."""
        theirs = self.receive_exactly(len(HELLO) + NONCE)
        if theirs[: len(HELLO)] != HELLO:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "who listens there is no memory server of this version")
        ours = os.urandom(NONCE)
        self.socket.sendall(ours + _proof(token, b"client", theirs[len(HELLO) :], ours))
        try:
            answer = self.receive_exactly(PROOF)
        except ConnectionError as error:
            raise PermissionError(errno.EACCES, "the memory server does not know us: it serves another job") from error
        if not hmac.compare_digest(answer, _proof(token, b"server", theirs[len(HELLO) :], ours)):
            raise PermissionError(errno.EACCES, "who listens there does not know the job's token")

    def authenticate_client(self, token: str) -> None:
        """Have a client prove that it knows *token*, and prove it too; raise ``PermissionError`` for a stranger."""
        ours = os.urandom(NONCE)
        self.socket.sendall(HELLO + ours)
        told = self.receive_exactly(NONCE + PROOF)
        if not hmac.compare_digest(told[NONCE:], _proof(token, b"client", ours, told[:NONCE])):
            raise PermissionError(errno.EACCES, "a stranger, or one of another job")
        self.socket.sendall(_proof(token, b"server", ours, told[:NONCE]))

    # -- messages and bytes -------------------------------------------------------------------------------------------

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def hear(self) -> dict[str, Any]:
        """Return the next message; raise ``ConnectionError`` when what comes is none."""
        (length,) = _LENGTH.unpack(self.receive_exactly(_LENGTH.size))
        if length > LONGEST_MESSAGE:
            raise ConnectionAbortedError(errno.ECONNABORTED, f"a message of {length} bytes is too long")
        try:
            message = json.loads(self.receive_exactly(length))
        except (ValueError, RecursionError) as error:
            raise ConnectionAbortedError(errno.ECONNABORTED, "a message is not JSON") from error
        if not isinstance(message, dict):
            raise ConnectionAbortedError(errno.ECONNABORTED, "a message is no object")
        return message

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer; raise `RequestRefused` when the server refuses it."""
        self.tell(message)
        answer = self.hear()
        if answer.get("ok") is not True:
            raise RequestRefused(str(answer.get("why", "the memory server refused without a word"))[:500])
        return answer

    def receive_exactly(self, size: int) -> bytes:
        """Return the next *size* bytes; raise ``ConnectionError`` when the connection ends before."""
        data = bytearray(size)
        with memoryview(data) as view:
            self.into(view)
        return bytes(data)

    def into(self, view: memoryview) -> None:
        """Fill *view* with the bytes that come next."""
        filled = 0
        while filled < len(view):
            if self.until is not None:
                self.socket.settimeout(max(0.001, self.until - time.monotonic()))
            with view[filled:] as rest:
                count = self.socket.recv_into(rest)
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "the connection ended in the middle")
            filled += count


class RequestRefused(OSError):
    """A memory server that does not do what it was asked for, in its own words."""


def connect(address: tuple[str, int], token: str, *, seconds: float) -> MemstoreConnection:
    """Return a connection to the memory server at *address*; raise ``OSError`` when there is none, or it is not the job's."""
    sock = socket.create_connection(address, timeout=seconds)
    line = MemstoreConnection(sock, seconds=seconds)
    try:
        line.ask_in(token)
    except BaseException:
        line.close()
        raise
    return line


def _proof(token: str, side: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(token.encode(), b"holdfast memory " + side + server + client, "sha256")


def _keep_alive(sock: socket.socket) -> None:
    """Notice a node that went away without a word within half a minute."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 10),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, 25_000),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
