"""Ask another node's memory server for its snapshots: the protocol's frames, the proof of knowing the job's token, two requests.

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
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from holdfast.memstore import shared_memory
from holdfast.memstore.shared_memory import Label, Slot, Unusable

HELLO: Final = b"HFMEMRY1"
NONCE: Final = 32
PROOF: Final = 32
LONGEST_MESSAGE: Final = 8 * 2**20
"""Bytes of JSON: the labels of some ten thousand snapshots."""
LONGEST_TAIL: Final = 2**30
"""Bytes of a snapshot's tail: it is held in memory for a moment."""
LABELS_SECONDS: Final = 10.0
STALL_SECONDS: Final = 30.0
"""Seconds without a byte after which a transfer is given up."""

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
        theirs = self.exactly(len(HELLO) + NONCE)
        if theirs[: len(HELLO)] != HELLO:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "who listens there is no memory server of this version")
        ours = os.urandom(NONCE)
        self.socket.sendall(ours + _proof(token, b"client", theirs[len(HELLO) :], ours))
        try:
            answer = self.exactly(PROOF)
        except ConnectionError as error:
            raise PermissionError(errno.EACCES, "the memory server does not know us: it serves another job") from error
        if not hmac.compare_digest(answer, _proof(token, b"server", theirs[len(HELLO) :], ours)):
            raise PermissionError(errno.EACCES, "who listens there does not know the job's token")

    def let_in(self, token: str) -> None:
        """Have a client prove that it knows *token*, and prove it too; raise ``PermissionError`` for a stranger."""
        ours = os.urandom(NONCE)
        self.socket.sendall(HELLO + ours)
        told = self.exactly(NONCE + PROOF)
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
        (length,) = _LENGTH.unpack(self.exactly(_LENGTH.size))
        if length > LONGEST_MESSAGE:
            raise ConnectionAbortedError(errno.ECONNABORTED, f"a message of {length} bytes is too long")
        try:
            message = json.loads(self.exactly(length))
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

    def exactly(self, size: int) -> bytes:
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


def labels(address: tuple[str, int], token: str, *, seconds: float = LABELS_SECONDS) -> dict[str, Label]:
    """Return the label of every sealed snapshot on the node that serves *address* (host, port), by the name of its file.

    Raise ``OSError`` (also ``PermissionError``, ``TimeoutError``) when it cannot be had, `Unusable` when an answer makes no sense.
    """
    until = time.monotonic() + seconds
    with connect(address, token, seconds=seconds) as line:
        line.until = until
        found = line.request({"do": "labels"}).get("labels")
    if not isinstance(found, dict):
        raise Unusable("the answer of the memory server names no snapshots")
    return {name: shared_memory.label_of(told) for name, told in found.items()}


def pull(address: tuple[str, int], token: str, name: str, label: Label, into: Path, *, seconds: float = STALL_SECONDS) -> None:  # noqa: PLR0913 (where, who, what, whereto)
    """Copy the snapshot *name*, if its label is still *label*, from the node that serves *address* to the file *into*, sealed last.

    Raise ``OSError`` when it cannot be had or there is no memory for it, `Unusable` when what comes is another snapshot or a damaged one.
    Whatever goes wrong, *into* is gone then. Data are as they were sent: the sums in the tail tell whether they are as they were written.
    """
    with connect(address, token, seconds=seconds) as line:
        request = {"do": "get", "name": name, "step": label.step, "lineage": label.lineage, "digest": label.digest}
        size = line.request(request).get("size")
        if size != label.file_size or label.tail > LONGEST_TAIL:
            raise Unusable(f"a file of {size} bytes is not the snapshot that was asked for")
        if shared_memory.read_label(line.exactly(shared_memory.PAGE)) != label:
            raise Unusable("it is not the snapshot that was asked for")
        slot = Slot(into, fresh=True)
        try:
            slot.begin(replace(label, tail=0, digest=""))
            line.into(slot.data)
            slot.adopt(label, line.exactly(label.tail))
        except BaseException:
            slot.discard()
            with suppress(OSError):
                into.unlink()
            raise
        finally:
            slot.close()


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
