"""One thread that reads from all agents, and the queue of the events that they have sent and the controller has not handled yet.

With a thread for each of thousands of connections they would only contend for the interpreter.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.log import note
from holdfast.protocol import Message

log = logging.getLogger("holdfast.control")

CHUNK: Final = 262144
"""Bytes that are read from a connection before the others have their turn."""
SWITCH_INTERVAL: Final = 0.0005
"""Seconds after which a busy thread yields. Reading a message releases the interpreter lock, and at Python's 5 ms until it is acquired
again a busy controller would read two hundred messages a second."""
MAX_EVENTS: Final = 1 << 16
"""Connections that one poll returns: all of them."""
_FAILED: Final = select.EPOLLHUP | select.EPOLLERR


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """A connection that the reactor reads from."""

    socket: socket.socket
    take: Callable[[bytes], None]
    """Called with the data received; it must not block."""
    ended: Callable[[OSError | None], None]
    """Called once, when nothing more will come."""


class Reactor:
    """Calls back with what any number of connections receive, each from the same thread, in the order of arrival."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._registered: dict[int, Registration] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._idle, self._caught_up = True, 0.0

    @property
    def caught_up(self) -> float:
        """Return until when (monotonic) everything that had arrived was read: a reactor that lags must not call agents silent.

        Its thread waits for data, or for a processor: after a stop of this process it may get one later than whoever asks.
        """
        now = time.monotonic()
        return now if self._idle and not self._poll.poll(0, 1) else self._caught_up

    def add(self, sock: socket.socket, take: Callable[[bytes], None], ended: Callable[[OSError | None], None]) -> Registration:
        """Read from *sock* from now on; an exception of *take* ends it."""
        registration = Registration(sock, take, ended)
        with self._lock:
            self._registered[sock.fileno()] = registration
            self._poll.register(sock.fileno(), select.EPOLLIN)
            if self._thread is None:
                sys.setswitchinterval(SWITCH_INTERVAL)
                self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
                self._thread.start()
        return registration

    def drop(self, registration: Registration) -> bool:
        """Stop reading; return whether it was registered. Call this before the socket is closed, as file descriptors are reused."""
        with self._lock:
            number = registration.socket.fileno()
            if self._registered.get(number) is not registration:
                return False
            del self._registered[number]
            self._poll.unregister(number)
            return True

    def _serve(self) -> None:
        while True:
            self._idle = True
            ready, polled_at = self._poll.poll(maxevents=MAX_EVENTS), time.monotonic()
            self._idle = False
            for number, mask in ready:
                if (registration := self._registered.get(number)) is not None:
                    self._read(registration, mask)
            self._caught_up = polled_at

    def _read(self, registration: Registration, mask: int) -> None:
        error: OSError | None = None
        try:
            if data := registration.socket.recv(CHUNK, socket.MSG_DONTWAIT):
                registration.take(data)
                return
        except BlockingIOError:
            if not mask & _FAILED:
                return
        except OSError as failed:
            error = failed
        except Exception as failed:  # noqa: BLE001 (one agent's invalid data must not end the thread that serves all others)
            error = OSError(str(failed))
            note(log, "agent.invalid-data", why=repr(failed))
        if self.drop(registration):
            registration.ended(error)


REACTOR: Final = Reactor()
"""The reactor of this process."""


# -- what has arrived --------------------------------------------------------------------------------------------------------

DEFERRABLE: Final = frozenset({"heartbeats"})
"""Events that arrive by the thousand each second: they wake nobody, and are handled in their turn with the next poll."""
MAX_BYTES: Final = 128 * 2**20
"""Bytes of one node that may wait here: an agent's event log, replayed to a controller that reattaches, has half of that."""

Item = tuple[str, Message]
"""A node's name and an event of its agent."""


class EventQueue:
    """A queue in the order of arrival, whose reader sleeps while only deferrable events arrive."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._urgent = 0
        self._changed = threading.Condition()
        self._bytes: dict[str, int] = {}

    def has_room(self, node: str, size: int = 0) -> bool:
        """Return whether *size* more bytes of *node* may wait here, and count them; without *size*, whether half of the room is free."""
        with self._changed:
            waiting = self._bytes.get(node, 0)
            if not size:
                return waiting <= MAX_BYTES / 2
            if waiting + size > MAX_BYTES:
                return False
            self._bytes[node] = waiting + size
            return True

    def put(self, item: Item) -> None:
        """Add an event."""
        with self._changed:
            self._items.append(item)
            if item[1].get("event") not in DEFERRABLE:
                self._urgent += 1
                self._changed.notify()

    def drain(self, seconds: float) -> deque[Item]:
        """Return all events as soon as one of them is urgent, or after *seconds*."""
        with self._changed:
            self._changed.wait_for(lambda: self._urgent, seconds)
            items, self._items, self._urgent = self._items, deque(), 0
            self._bytes.clear()
            return items

    def get(self, timeout: float) -> Item:
        """Return the oldest event, waiting up to *timeout* seconds for one; raise ``queue.Empty`` when there is none."""
        end = time.monotonic() + timeout
        with self._changed:
            while not self._items:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    raise queue.Empty
                self._changed.wait(min(remaining, 0.05))  # deferrable events do not notify
            item = self._items.popleft()
            self._urgent -= item[1].get("event") not in DEFERRABLE
            return item
