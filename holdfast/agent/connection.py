"""One end of a stream of messages that never makes the agent wait."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast.protocol import LineBuffer, Message, encode

if TYPE_CHECKING:
    from holdfast.agent.workers.worker import Worker

CHUNK: Final = 64 * 1024
"""Bytes taken in one go: one that talks without end must not keep the others from being heard."""
ENOUGH: Final = 512 * 1024
"""Bytes on their way to a reader from which on it is told no more events until it has read some."""
MOST_UNSENT: Final = 8 * 1024 * 1024
"""Bytes of answers that a reader may leave unread before it is cut off."""


class MessageStream:
    """A socket, what has arrived on it and what is still to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)  # noqa: FBT003 (its only argument)
        self.socket, self.unsent = sock, bytearray()
        self.event_queue: deque[Message] = deque()
        self._lines = LineBuffer()

    def read(self) -> bool:
        """Take in what has arrived, a chunk at most; False when the other end is gone. Raise `BadLine` on garbage."""
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for message in self._lines.feed(data):
            self.event_queue.append(message)
        return bool(data)

    def send(self, message: Message) -> bool:
        """Send *message*, or keep it until it can be sent; False when the other end is gone or too far behind."""
        self.unsent += encode(message)
        return self.drain() and len(self.unsent) < MOST_UNSENT

    def drain(self) -> bool:
        """Send what can be sent now; False when the other end is gone."""
        while self.unsent:
            try:
                sent = self.socket.send(self.unsent)
            except BlockingIOError:
                return True
            except OSError:
                return False
            del self.unsent[:sent]
        return True


class ClientConnection(MessageStream):
    """One connection to the agent's socket: a flow, a worker or a standby, as its messages tell."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.pid = int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0])
        """The process that connected, as the kernel knows it."""
        self.told: int | None = None
        """Number of the last event sent to it, once it has asked for them."""
        self.past: Iterator[tuple[int, bytes]] | None = None
        """The journal, where it is being read to this peer."""
        self.worker: Worker | None = None
        """Whom it speaks for, once that is known."""
        self.nobody = False
        """It is known to speak for no worker."""
        self.stranger: str | None = None
        """Why it is not listened to any more."""
