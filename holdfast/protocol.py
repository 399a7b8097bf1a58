"""The protocol between controller, agent and worker: JSON lines over unix sockets.

Standard library only: the agent, the runtime inside the training process and the control side import it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

PROTOCOL: Final = 1
"""Version in every hello; another one is refused with a message that says what to install."""

GREETING: Final = b"holdfast-proxy "
"""Prefix of the first line of a node's proxy: a login shell may print other lines before it."""

HEARTBEAT_INTERVAL: Final = 0.25
"""Seconds between two heartbeats of an agent to its controller while workers run, unless the controller of a large job asks for fewer."""

MAX_LINE_BYTES: Final = 4 * 1024 * 1024

MAX_DEPTH: Final = 64
"""Objects and lists inside each other. A deeper message can be read, but then neither written nor shown: both exceed Python's own limit."""

MAX_ADDRESS_BYTES: Final = 100
"""Bytes of a path that certainly fit into a socket's address (the kernel has room for 107)."""

Message = dict[str, Any]


class BadLine(ValueError):
    """A line that is not a message: not JSON, not an object, too deep or too long."""


def encode(message: Message) -> bytes:
    """Return *message* as one line. NaN and infinities are written as Python's JSON does (``NaN``)."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def decode(line: bytes | bytearray) -> Message:
    """Return the message in *line*; raise `BadLine` for anything that is not one JSON object."""
    try:
        message = json.loads(str(line, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {bytes(line[:80])!r}") from error
    if not isinstance(message, dict):
        raise BadLine(f"not an object: {bytes(line[:80])!r}")
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_too_deep(message):
        raise BadLine(f"more than {MAX_DEPTH} objects inside each other: {bytes(line[:80])!r}")
    return message


def _is_too_deep(message: Message) -> bool:
    """Return whether more than `MAX_DEPTH` objects and lists are inside each other; a message may have thousands side by side."""
    layer: list[Any] = [message]
    for _ in range(MAX_DEPTH):
        layer = [inner for one in layer for inner in (one.values() if isinstance(one, dict) else one) if isinstance(inner, (dict, list))]
        if not layer:
            return False
    return True


class LineBuffer:
    """Collects bytes as they arrive and returns complete messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take *data* and yield every message that is now complete; raise `BadLine` on garbage, after the messages before it."""
        self._rest += data
        lines = []
        if b"\n" in data:  # else the whole rest would be searched again for every few bytes
            *lines, self._rest = self._rest.split(b"\n")
        return self._messages(lines, too_long=len(self._rest) > MAX_LINE_BYTES)

    @staticmethod
    def _messages(lines: list[bytearray], *, too_long: bool) -> Iterator[Message]:
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                raise BadLine(f"a line of {len(line)} bytes is too long")
            if line.strip():
                yield decode(line)
        if too_long:
            raise BadLine(f"a line of more than {MAX_LINE_BYTES} bytes is too long")


def numbered(number: int, lines: bytes) -> bytes:
    """Return complete *lines*, each with the number of its stream before it: a proxy's channel carries several streams."""
    prefix = b"%d " % number
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def complete_lines(sock: socket.socket, most: int) -> Iterator[bytes]:
    """Yield what comes from *sock*, up to *most* bytes at a time, cut at the ends of lines; end when it closes. Raise ``OSError``."""
    rest = b""
    while data := sock.recv(most):
        complete, newline, tail = data.rpartition(b"\n")
        if newline:
            yield rest + complete + newline
            rest = tail
        else:
            rest += data


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Give an address for the socket at *path* that fits into what the kernel allows.

    A node's directory may lie deep: an open descriptor of the folder makes the address short.
    """
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(path: Path, *, seconds: float | None = None) -> socket.socket:
    """Connect to the unix socket at *path*; raise ``OSError`` when nothing listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(seconds)
        with socket_address(path) as address:
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(path: Path) -> socket.socket:
    """Listen on a unix socket at *path* that only its owner may open (mode 0600); replace a stale one."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old = os.umask(0o177)
    try:
        with socket_address(path) as address:
            sock.bind(address)
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(old)
    return sock
