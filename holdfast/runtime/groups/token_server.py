"""A listening socket and one thread that serves its callers; each must prove within seconds that it knows the job's token."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from holdfast.security.authenticated_listener import PendingCallers, open_port

HELLO_SECONDS: Final = 5.0
"""How long a caller may take to prove that it knows the token."""
MAX_UNAUTHENTICATED: Final = 32
"""Unauthenticated callers that have all of `HELLO_SECONDS`; with more, each has a moment, so that they cannot exhaust the descriptors."""
MAX_HELLO: Final = 4096
"""Bytes that a caller may send before it has proved that it knows the token."""


class Caller(Protocol):
    """A connection as the server holds it."""

    socket: socket.socket


C = TypeVar("C", bound=Caller)


class TokenServer(ABC, Generic[C]):
    """Accepts callers and reads from them, in a thread of its own. `authenticated` must be called for those that know the token."""

    def __init__(self, port: int, *, backlog: int, name: str) -> None:
        """Listen on *port* (0: any). Raise ``OSError`` when that fails."""
        self._listener = open_port(port, backlog=backlog)
        self.port = int(self._listener.getsockname()[1])
        self._pending = PendingCallers[C]()
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._listener.settimeout(0)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @abstractmethod
    def _new_caller(self, connection: socket.socket) -> C:
        """Return the state of a caller that has just connected."""

    @abstractmethod
    def _pump(self, caller: C, events: int) -> None:
        """Read from and write to *caller*; call `_drop` when it fails."""

    def close(self) -> None:
        """Stop serving; the port is free soon after."""
        with suppress(OSError):  # closed before
            self._waker.send(b".")

    def authenticated(self, caller: C) -> None:
        """Note that *caller* has proved that it knows the token."""
        self._pending.discard(caller)

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._pending.due(MAX_UNAUTHENTICATED, HELLO_SECONDS)):
                if key.fileobj is self._wake:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data.socket.fileno() >= 0:  # not dropped in this very round
                    self._pump(key.data, events)
            for late in self._pending.late(MAX_UNAUTHENTICATED, HELLO_SECONDS):
                self._drop(late)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._waker.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:  # without a pause this would use a whole core
                time.sleep(0.0 if len(self._pending) else 0.01)
                for caller in self._pending:
                    self._drop(caller)
            return
        caller = self._new_caller(connection)
        self._pending.add(caller)
        try:
            connection.settimeout(0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, caller)
        except OSError:
            self._drop(caller)

    def _drop(self, caller: C) -> None:
        """Close the connection of a caller that left, was too slow, or sent something else than the protocol allows."""
        self._pending.discard(caller)
        with suppress(KeyError, ValueError):
            self._selector.unregister(caller.socket)
        caller.socket.close()
