"""Message streams that never block the agent: the base of its connections to clients, sidecars and fork servers."""

from __future__ import annotations

import selectors
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast.protocol import LineBuffer, Message, encode

if TYPE_CHECKING:
    from holdfast.agent.workers.worker import Worker

CHUNK: Final = 64 * 1024
"""Bytes read at once: one client that sends without end must not starve the others."""
ENOUGH: Final = 512 * 1024
"""Unsent bytes from which on a client gets no more events until it has read some."""
MAX_UNSENT: Final = 8 * 1024 * 1024
"""Bytes of answers that a client may leave unread before it is disconnected."""


class MessageStream:
    """A socket, the messages received on it, and the bytes still to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)  # noqa: FBT003 (its only argument)
        self.socket, self.unsent = sock, bytearray()
        self.received: deque[Message] = deque()
        self._lines = LineBuffer()

    def read(self) -> bool:
        """Read at most a chunk; False when the other end has closed. Raise `BadLine` on garbage."""
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for message in self._lines.feed(data):
            self.received.append(message)
        return bool(data)

    def send(self, message: Message) -> bool:
        """Send *message*, or keep it until it can be sent; False when the other end has closed or is too far behind."""
        self.unsent += encode(message)
        return self.drain() and len(self.unsent) < MAX_UNSENT

    def drain(self) -> bool:
        """Send what can be sent now; False when the other end has closed."""
        while self.unsent:
            try:
                sent = self.socket.send(self.unsent)
            except BlockingIOError:
                return True
            except OSError:
                return False
            del self.unsent[:sent]
        return True

    def wait_for(self, selector: selectors.BaseSelector, events: int | None = None) -> None:
        """Have *selector* wait for *events* of this stream, or else for input, and for room while something is unsent."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0) if events is None else events
        key = selector.get_key(self.socket)
        if key.events != wanted:
            selector.modify(self.socket, wanted, key.data)


class ClientConnection(MessageStream):
    """One connection to the agent's socket: a controller, a worker or a hot spare, as its messages show."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.pid = int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0])
        """The process that connected, as the kernel knows it."""
        self.sent_seq: int | None = None
        """Number of the last event sent to it, once it has attached."""
        self.replay: Iterator[tuple[int, bytes]] | None = None
        """Events from the log that are being sent to it."""
        self.worker: Worker | None = None
        """The worker whose process it is, once that is known."""
        self.is_no_worker = False
        """It is known to belong to no worker."""
        self.mismatch: str | None = None
        """Why its messages are ignored: it speaks another protocol."""
