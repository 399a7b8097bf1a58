"""The connection to a memory server: mutual authentication by the job's token, then JSON messages and the bytes of snapshots.

Both sides prove that they know the token (HMAC-SHA256 over random numbers of both sides) before anything else is sent. A message is a
length and JSON; the bytes of snapshots follow as they are. Nothing is unpickled, and every length is bounded.
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
"""JSON of one message: the labels of about ten thousand snapshots."""
LONGEST_TAIL: Final = 2**30
"""Tail of a snapshot, which is kept in memory while it is received."""

FRAME: Final = struct.Struct("<cQ")
DATA, TAIL, ABANDON = b"D", b"T", b"A"
"""Kinds of frames of a replica: data in the order of the file; the tail, after the sealed label; the sender gives the replica up."""
LONGEST_FRAME: Final = 64 * 2**20
_LENGTH: Final = struct.Struct("<I")


class MemstoreConnection:
    """A connection between two processes that know the same token."""

    def __init__(self, sock: socket.socket, *, seconds: float) -> None:
        """Take over *sock*; an operation without progress for *seconds* raises ``TimeoutError``."""
        self.socket = sock
        self.until: float | None = None
        """Deadline for everything that is received (monotonic clock); None: no deadline as long as bytes arrive."""
        sock.settimeout(seconds)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a node that disappears is noticed within half a minute
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    # -- authentication -----------------------------------------------------------------------------------------------

    def authenticate_to_server(self, token: str) -> None:
        """Prove as a client that this process knows *token*; raise ``PermissionError`` when the server does not know it too."""
        theirs = self.receive_exactly(len(HELLO) + NONCE)
        if theirs[: len(HELLO)] != HELLO:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "no memory server of this version listens there")
        ours = os.urandom(NONCE)
        self.socket.sendall(ours + _proof(token, b"client", theirs[len(HELLO) :], ours))
        try:
            answer = self.receive_exactly(PROOF)
        except ConnectionError as error:
            raise PermissionError(errno.EACCES, "the memory server refuses the token: it serves another job") from error
        if not hmac.compare_digest(answer, _proof(token, b"server", theirs[len(HELLO) :], ours)):
            raise PermissionError(errno.EACCES, "the memory server does not know the job's token")

    def authenticate_client(self, token: str) -> None:
        """Check as a server that the client knows *token*, and prove it in turn; raise ``PermissionError`` when it does not."""
        ours = os.urandom(NONCE)
        self.socket.sendall(HELLO + ours)
        theirs = self.receive_exactly(NONCE + PROOF)
        if not hmac.compare_digest(theirs[NONCE:], _proof(token, b"client", ours, theirs[:NONCE])):
            raise PermissionError(errno.EACCES, "the client does not know the job's token")
        self.socket.sendall(_proof(token, b"server", ours, theirs[:NONCE]))

    # -- messages and bytes -------------------------------------------------------------------------------------------

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> dict[str, Any]:
        """Return the next message; raise ``ConnectionError`` for anything else."""
        (length,) = _LENGTH.unpack(self.receive_exactly(_LENGTH.size))
        if length > LONGEST_MESSAGE:
            raise ConnectionAbortedError(errno.ECONNABORTED, f"a message of {length} bytes is too long")
        try:
            message = json.loads(self.receive_exactly(length))
        except (ValueError, RecursionError) as error:
            raise ConnectionAbortedError(errno.ECONNABORTED, "a message is not JSON") from error
        if not isinstance(message, dict):
            raise ConnectionAbortedError(errno.ECONNABORTED, "a message is not a JSON object")
        return message

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer; raise `RequestRefused` when the server refuses it."""
        self.send(message)
        answer = self.receive()
        if answer.get("ok") is not True:
            raise RequestRefused(str(answer.get("why", "the memory server refused without a reason"))[:500])
        return answer

    def receive_exactly(self, size: int) -> bytes:
        """Return the next *size* bytes; raise ``ConnectionError`` when the connection ends before."""
        data = bytearray(size)
        with memoryview(data) as view:
            self.receive_into(view)
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Fill *view* with the next bytes; raise ``ConnectionError`` when the connection ends before."""
        filled = 0
        while filled < len(view):
            if self.until is not None:
                self.socket.settimeout(max(0.001, self.until - time.monotonic()))
            with view[filled:] as rest:
                count = self.socket.recv_into(rest)
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "the connection ended in the middle of a message")
            filled += count


class RequestRefused(OSError):
    """A memory server refused a request, with its reason."""


def connect(address: tuple[str, int], token: str, *, seconds: float) -> MemstoreConnection:
    """Return a connection to the memory server at *address*; raise ``OSError`` when there is none, or it is not the job's."""
    line = MemstoreConnection(socket.create_connection(address, timeout=seconds), seconds=seconds)
    try:
        line.authenticate_to_server(token)
    except BaseException:
        line.close()
        raise
    return line


def _proof(token: str, side: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(token.encode(), b"holdfast memory " + side + server + client, "sha256")
