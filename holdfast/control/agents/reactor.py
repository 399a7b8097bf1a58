"""One thread that hears every agent: a thread for each of thousands of connections would spend its time on the interpreter's lock."""

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
"""Bytes that are taken from a connection before the others have their turn."""
SWITCH: Final = 0.0005
"""Seconds after which a busy thread lets another one go on. Reading a message lets go of the interpreter, and Python's 5 ms until it is had
again would make a flow that is at work hear two hundred messages a second."""
MOST: Final = 1 << 16
"""Connections that are looked at at once: all of them."""
_FAILED: Final = select.EPOLLHUP | select.EPOLLERR


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A connection that is listened to."""

    socket: socket.socket
    take: Callable[[bytes], None]
    """Called with what came; it must not wait for anything."""
    ended: Callable[[OSError | None], None]
    """Called once, when nothing will come any more."""


class Reactor:
    """Calls back with what comes from any number of connections, each from the one thread, in the order in which it came."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._heard: dict[int, Received] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waits, self._caught_up = True, 0.0

    @property
    def caught_up(self) -> float:
        """Return until when (monotonic) all has been heard that had come: who is behind must not call others silent."""
        return time.monotonic() if self._waits else self._caught_up

    def add(self, sock: socket.socket, take: Callable[[bytes], None], ended: Callable[[OSError | None], None]) -> Received:
        """Listen to *sock* from now on; what `take` raises ends it."""
        one = Received(sock, take, ended)
        with self._lock:
            self._heard[sock.fileno()] = one
            self._poll.register(sock.fileno(), select.EPOLLIN)
            if self._thread is None:
                sys.setswitchinterval(SWITCH)
                self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
                self._thread.start()
        return one

    def drop(self, one: Received) -> bool:
        """Listen to it no more; tell whether it was listened to. To be called before its socket is closed: numbers are used again."""
        with self._lock:
            number = one.socket.fileno()
            if self._heard.get(number) is not one:
                return False
            del self._heard[number]
            self._poll.unregister(number)
            return True

    def _serve(self) -> None:
        while True:
            self._waits = True
            ready, asked = self._poll.poll(maxevents=MOST), time.monotonic()
            self._waits = False
            for number, mask in ready:
                one = self._heard.get(number)
                if one is not None:
                    self._hear(one, mask)
            self._caught_up = asked

    def _hear(self, one: Received, mask: int) -> None:
        error: OSError | None = None
        try:
            if data := one.socket.recv(CHUNK, socket.MSG_DONTWAIT):
                one.take(data)
                return
        except BlockingIOError:
            if not mask & _FAILED:
                return
        except OSError as failed:
            error = failed
        except Exception as failed:  # noqa: BLE001 (one agent's nonsense must not make the flow deaf to all others)
            error = OSError(str(failed))
            note(log, "agent.garbage", why=repr(failed))
        if self.drop(one):
            one.ended(error)


REACTOR: Final = Reactor()
"""That of this process."""
