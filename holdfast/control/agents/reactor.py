"""One thread that reads from all agents: with a thread for each of thousands of connections they would only contend for the interpreter."""

from __future__ import annotations

import logging
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.log import note

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
        """Return until when (monotonic) everything that had arrived was read: a reactor that lags must not call agents silent."""
        return time.monotonic() if self._idle else self._caught_up

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
