"""The key-value store of a generation over our own sockets: how ranks exchange small values while they rendezvous.

torch's `TCPStore` resolves the name of every peer before a connection is usable, for its log. If the name service drops a query now and
then, this costs five seconds and more in the middle of a recovery. Its connections also serve one request at a time, so a rank that waits
for a value cannot ask for anything else. This store never resolves names, any number of threads may wait on one connection, closing it ends
all their waits, and callers must know the job's token.
"""

from __future__ import annotations

import errno
import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from holdfast.runtime.groups.backends import BUILD_SECONDS, GenerationEnded, poll_interval
from holdfast.runtime.groups.token_server import HELLO_SECONDS, MAX_HELLO, TokenServer

if TYPE_CHECKING:
    from holdfast.runtime.groups.membership import GroupGeneration

_HEAD: Final = struct.Struct("!IBI")
"""Length of the parts, verb, number of the request."""
_PART: Final = struct.Struct("!I")
MAX_FRAME: Final = 256 * 2**20
MAX_UNSENT: Final = 2 * MAX_FRAME
"""Bytes of answers that a caller may leave unread before it is dropped."""
_TIMEOUT: Final = timedelta(seconds=BUILD_SECONDS)


class Verb(IntEnum):
    """The requests."""

    HELLO = 0
    SET = 1
    GET = 2
    """Waits until all keys exist, as `WAIT` does."""
    WAIT = 3
    CHECK = 4
    ADD = 5
    COMPARE = 6
    DELETE = 7
    COUNT = 8
    APPEND = 9


def _frame(verb: int, number: int, parts: Sequence[bytes]) -> bytes:
    body = b"".join(_PART.pack(len(part)) + part for part in parts)
    return _HEAD.pack(len(body), verb, number) + body


class _Frames:
    """Splits received bytes into frames."""

    def __init__(self, longest: int = MAX_FRAME) -> None:
        self.longest = longest
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, list[bytes]]]:
        """Add *data*; return the complete frames: verb, number, parts. Raise ``ValueError`` for an invalid one."""
        self._data += data
        found = []
        while len(self._data) >= _HEAD.size:
            length, verb, number = _HEAD.unpack_from(self._data)
            if length > self.longest:
                raise ValueError("too long")
            end = _HEAD.size + length
            if len(self._data) < end:
                break
            parts, place = [], _HEAD.size
            while place < end:
                (size,) = _PART.unpack_from(self._data, place)
                place += _PART.size + size
                if place > end:
                    raise ValueError("a part is cut off")
                parts.append(bytes(self._data[place - size : place]))
            found.append((verb, number, parts))
            del self._data[:end]
        return found


# -- server -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _ClientConnection:
    """A connection as the server holds it."""

    socket: socket.socket
    frames: _Frames = field(default_factory=lambda: _Frames(MAX_HELLO))
    known: bool = False
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request that waits for keys."""

    caller: _ClientConnection
    verb: int
    number: int
    keys: list[bytes]
    missing: set[bytes]


class KvServer(TokenServer[_ClientConnection]):
    """Hosts a store: one thread, any number of connections."""

    def __init__(self, port: int, token: str) -> None:
        """Listen on *port* (0: any). Raise ``DistNetworkError`` when that fails."""
        self._token = token.encode()
        self._values: dict[bytes, bytes] = {}
        self._verbs: dict[Verb, Callable[..., list[bytes]]] = {
            Verb.SET: self._set,
            Verb.CHECK: lambda *keys: [b"1" if all(key in self._values for key in keys) else b"0"],
            Verb.ADD: self._add,
            Verb.COMPARE: self._compare,
            Verb.DELETE: lambda key: [b"1" if self._values.pop(key, None) is not None else b"0"],
            Verb.COUNT: lambda: [b"%d" % len(self._values)],
            Verb.APPEND: lambda key, value: self._set(key, self._values.get(key, b"") + value),
        }
        self._waiting: dict[bytes, list[_WaitingRequest]] = {}
        try:
            super().__init__(port, backlog=4096, name="holdfast-store")
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "?")
            raise dist.DistNetworkError(
                f"The server socket has failed to listen on port {port}: name: {name}, message: {error.strerror}"
            ) from error

    def _new_caller(self, connection: socket.socket) -> _ClientConnection:
        return _ClientConnection(connection)

    def _pump(self, caller: _ClientConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(caller)
            if events & selectors.EVENT_READ:
                data = caller.socket.recv(1 << 18)
                if not data:
                    raise ConnectionError("closed")
                for verb, number, parts in caller.frames.feed(data):
                    self._handle(caller, verb, number, parts)
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError, KeyError, IndexError, struct.error):
            self._drop(caller)

    def _drop(self, caller: _ClientConnection) -> None:
        """Close a connection, and forget what it waits for."""
        super()._drop(caller)
        for key, waiters in list(self._waiting.items()):
            self._waiting[key] = [one for one in waiters if one.caller is not caller]
            if not self._waiting[key]:
                del self._waiting[key]

    def _handle(self, caller: _ClientConnection, verb: int, number: int, parts: list[bytes]) -> None:
        if caller.known and verb in (Verb.GET, Verb.WAIT):
            waiter = _WaitingRequest(caller, verb, number, parts, {key for key in parts if key not in self._values})
            for key in waiter.missing:
                self._waiting.setdefault(key, []).append(waiter)
            if not waiter.missing:
                self._fulfil(waiter)
        elif caller.known:
            self._answer(caller, number, *self._verbs[Verb(verb)](*parts))
        elif verb == Verb.HELLO and hmac.compare_digest(parts[0], self._token):
            caller.known, caller.frames.longest = True, MAX_FRAME
            self.authenticated(caller)
            self._answer(caller, number)
        else:
            raise ValueError("wrong token")

    def _set(self, *parts: bytes) -> list[bytes]:
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            self._values[key] = value
            for waiter in self._waiting.pop(key, []):
                waiter.missing.discard(key)
                if not waiter.missing:
                    self._fulfil(waiter)
        return []

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        self._set(key, b"%d" % (int(self._values.get(key, b"0")) + int(amount)))
        return [self._values[key]]

    def _compare(self, key: bytes, expected: bytes, wanted: bytes) -> list[bytes]:
        if self._values.get(key, b"") == expected:
            self._set(key, wanted)
        return [self._values.get(key, expected)]

    def _fulfil(self, waiter: _WaitingRequest) -> None:
        found = [self._values.get(key, b"") for key in waiter.keys] if waiter.verb == Verb.GET else []
        self._answer(waiter.caller, waiter.number, *found)

    def _answer(self, caller: _ClientConnection, number: int, *parts: bytes) -> None:
        caller.unsent += _frame(0, number, parts)
        with suppress(OSError):  # the next read reports it
            if len(caller.unsent) > MAX_UNSENT:
                caller.socket.shutdown(socket.SHUT_RDWR)
            self._send(caller)

    def _send(self, caller: _ClientConnection) -> None:
        try:
            while caller.unsent:
                del caller.unsent[: caller.socket.send(caller.unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.unsent else 0)
        if self._selector.get_key(caller.socket).events != wanted:
            self._selector.modify(caller.socket, wanted, caller)


# -- client -----------------------------------------------------------------------------------------------------------

_alive: Final[list[KvStore]] = []
"""torch keeps the C++ half of a store; the Python half must live as long."""


class KvStore(dist.Store):
    """A connection to a `KvServer` with the interface of torch's stores. Its threads do not block each other."""

    def __init__(self, host: str, port: int, token: str, timeout: timedelta) -> None:
        """Connect. Raise ``OSError`` when no server listens there, or the token is rejected."""
        super().__init__()
        self.set_timeout(timeout)
        self._seconds = timeout.total_seconds()
        self._connection = socket.create_connection((host, port), timeout=HELLO_SECONDS)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host = str(self._connection.getsockname()[0])
        """This process's own address, as the server sees it."""
        self._frames, self._count = _Frames(), 0
        self._sending, self._news = threading.Lock(), threading.Condition()
        self._answers: dict[int, list[bytes]] = {}
        self.error = ""
        """Why the connection is unusable."""
        self._long_waits: list[_LongTimeoutStore] = []
        try:
            self._connection.sendall(_frame(Verb.HELLO, 0, [token.encode()]))
            while not self._receive():
                pass
            self._connection.settimeout(None)
        except BaseException:
            self._connection.close()
            raise
        _alive.append(self)
        threading.Thread(target=self._read, name="holdfast-store-reader", daemon=True).start()

    def _receive(self) -> dict[int, list[bytes]]:
        """Return the next answers by the number of their request. Raise ``OSError`` or ``ValueError``."""
        data = self._connection.recv(1 << 18)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "Connection closed by peer")
        return {number: parts for _, number, parts in self._frames.feed(data)}

    def _read(self) -> None:
        """Receive answers until the connection ends."""
        try:
            while True:
                answers = self._receive()
                with self._news:
                    self._answers.update(answers)
                    self._news.notify_all()
        except (OSError, ValueError) as error:
            self._fail(getattr(error, "strerror", None) or str(error))
            self._connection.close()

    def _fail(self, why: str) -> None:
        with self._news:
            self.error = self.error or why
            self._news.notify_all()

    def close(self, why: str = "Socket closed") -> None:
        """End the connection, and with it every wait in it."""
        self._fail(why)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def with_timeout(self, timeout: timedelta) -> _LongTimeoutStore:
        """Return this store with another *timeout*, for waits that `end_long_waits` can end before."""
        made = _LongTimeoutStore(self, timeout)
        with self._news:
            self._long_waits.append(made)
        return made

    def end_long_waits(self, why: str) -> None:
        """End every wait in a store made by `with_timeout`: the awaited values will not come."""
        with self._news:
            for one in self._long_waits:
                one.error = why
            self._long_waits.clear()
            self._news.notify_all()

    def _request(self, verb: Verb, parts: Sequence[bytes], seconds: float | None = None) -> list[bytes]:
        """Send a request and wait for its answer; raise the errors of torch's own store."""
        return self.request(verb, parts, self._seconds if seconds is None else seconds, lambda: self.error)

    def request(self, verb: Verb, parts: Sequence[bytes], seconds: float, failed: Callable[[], str]) -> list[bytes]:
        """Send a request and wait for its answer: at most so many *seconds*, and until *failed* returns a reason why none will come."""
        until = time.monotonic() + seconds
        try:
            with self._sending:
                self._count += 1
                number = self._count
                self._connection.sendall(_frame(verb, number, parts))
        except OSError as error:
            raise dist.DistNetworkError(f"the store's connection ended: {self.error or error}") from error
        with self._news:
            while number not in self._answers:
                if why := failed():
                    raise dist.DistNetworkError(f"the store's connection ended: {why}")
                remaining = until - time.monotonic()
                if remaining <= 0:
                    keys = ", ".join(part.decode(errors="replace") for part in parts[:3])
                    raise dist.DistStoreError(f"wait timeout, keys: {keys}")
                self._news.wait(remaining)
            return self._answers.pop(number)

    # -- torch's interface --------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Store *value* under *key*."""
        self._request(Verb.SET, [key.encode(), _bytes(value)])

    def get(self, key: str) -> bytes:
        """Return the value of *key*; wait for it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of *keys*; wait for all."""
        return self._request(Verb.GET, [key.encode() for key in keys])

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Store a value under each of *keys*."""
        self._request(Verb.SET, [part for pair in zip(keys, values, strict=True) for part in (pair[0].encode(), _bytes(pair[1]))])

    def add(self, key: str, amount: int) -> int:
        """Add to the number under *key*; return the sum."""
        return int(self._request(Verb.ADD, [key.encode(), b"%d" % amount])[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Append *value* to the value of *key*."""
        self._request(Verb.APPEND, [key.encode(), _bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store *desired* under *key* if its value is *expected*; return the value afterwards."""
        return self._request(Verb.COMPARE, [key.encode(), _bytes(expected), _bytes(desired)])[0]

    def check(self, keys: list[str]) -> bool:
        """Return whether all *keys* exist."""
        return self._request(Verb.CHECK, [key.encode() for key in keys]) == [b"1"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all *keys* exist."""
        self._request(Verb.WAIT, [key.encode() for key in keys], None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Remove *key*; return whether it existed."""
        return self._request(Verb.DELETE, [key.encode()]) == [b"1"]

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._request(Verb.COUNT, [])[0])

    def has_extended_api(self) -> bool:
        """Return True: it supports ``append`` and operations on several keys."""
        return True

    deleteKey = delete_key  # noqa: N815 (the names that torch's C++ calls)
    getNumKeys = num_keys  # noqa: N815


class _LongTimeoutStore(KvStore):
    """The same connection with another timeout, for values that may take long."""

    def __init__(self, root: KvStore, timeout: timedelta) -> None:
        dist.Store.__init__(self)
        self.set_timeout(timeout)
        self._root, self._seconds, self.host, self.error = root, timeout.total_seconds(), root.host, ""
        _alive.append(self)

    def _request(self, verb: Verb, parts: Sequence[bytes], seconds: float | None = None) -> list[bytes]:
        return self._root.request(verb, parts, self._seconds if seconds is None else seconds, lambda: self._root.error or self.error)


def _bytes(value: Any) -> bytes:  # noqa: ANN401 (torch passes strings, bytes, and lists of numbers)
    return value.encode() if isinstance(value, str) else bytes(value)


# -- the stores of a process ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerationStore:
    """The store of one generation, as this process reaches it."""

    root: KvStore
    place: tuple[str, int, int, int]
    """Address of the store, the rank that hosts it, and the generation in which that process took the rank."""
    number: int
    serving: bool
    """This process hosts it."""

    @property
    def host(self) -> str:
        """Return this process's own address, as others reach it."""
        return self.place[0] if self.serving else self.root.host

    def prefixed(self, name: str, timeout: timedelta | None = None) -> dist.Store:
        """Return the part of the store for one purpose in this generation, with another *timeout* if given."""
        return dist.PrefixStore(f"generation-{self.number}/{name}", self.root if timeout is None else self.root.with_timeout(timeout))

    def find(self, rank: int, incarnation: int) -> tuple[str, int] | None:
        """Return the address of the acceptor of *rank*, once that process has published it."""
        name = f"acceptor/{rank}/{incarnation}"
        if not self.root.check([name]):
            return None
        host, port = self.root.get(name).decode().split()
        return host, int(port)


class KvStoreAccess:
    """Opens the stores of generations for this process: hosts one, connects to it, or keeps the current connection."""

    def __init__(self, acceptor: int, token: str) -> None:
        """*acceptor*: the port of this process's acceptor; *token*: the job's, by which ranks authenticate each other."""
        self._acceptor, self._token = acceptor, token
        self._current: GenerationStore | None = None
        self._servers: dict[int, KvServer] = {}

    def open(
        self, generation: GroupGeneration, is_cancelled: Callable[[], bool], *, leaving: bool = False, timeout: timedelta | None = None
    ) -> GenerationStore:
        """Connect to the store of *generation*, or host it; publish the address of this rank's acceptor there.

        A connection to the same store is kept, so that ranks not affected by a change have little to do.

        Args:
            generation: the generation to enter.
            is_cancelled: returns whether *generation* has been cancelled: then `GenerationEnded` is raised.
            leaving: another process takes this rank, so this process's acceptor is not published.
            timeout: how long the hosting rank may take; default: as long as in a recovery.
        """
        host, port = generation.store
        place = (host, port, generation.serve, generation.incarnations[generation.serve])
        serving, current = generation.serve == generation.rank, self._current
        if current is not None and current.place == place and not current.root.error:
            return GenerationStore(current.root, place, generation.number, serving)
        root = self.connect(generation, is_cancelled, timeout)
        opened = GenerationStore(root, place, generation.number, serving)
        if not leaving:
            root.set(f"acceptor/{generation.rank}/{generation.incarnations[generation.rank]}", f"{opened.host} {self._acceptor}")
        return opened

    def connect(self, generation: GroupGeneration, is_cancelled: Callable[[], bool], timeout: timedelta | None = None) -> KvStore:
        """Return a connection to the store of *generation*, as soon as it listens; the caller closes it.

        The process of the hosting rank hosts it from here on: where several ranks are lost, a new process may host the store in which it
        looks for its own record.
        """
        host, port = generation.store
        serving = generation.serve == generation.rank
        if serving and port not in self._servers:
            self._servers[port] = KvServer(port, self._token)
        address = ("127.0.0.1" if serving else host, port)
        began, patience = time.monotonic(), (timeout or _TIMEOUT).total_seconds()
        while True:
            try:
                return KvStore(*address, self._token, _TIMEOUT)
            except OSError as error:
                if is_cancelled():
                    raise GenerationEnded from None
                if time.monotonic() > began + patience:
                    raise dist.DistNetworkError(f"the store at {address[0]}:{address[1]} cannot be reached: {error}") from error
            time.sleep(poll_interval(time.monotonic() - began))

    def use(self, opened: GenerationStore) -> None:
        """Take *opened* as the current store; close all others."""
        before, self._current = self._current, opened
        if before is not None and before.root is not opened.root:
            before.root.close("another store has replaced it")
        for port in [port for port in self._servers if port != opened.place[1]]:
            self._servers.pop(port).close()

    def reconnect_next_time(self) -> None:
        """Open a new connection next time: something failed that may have been the connection."""
        self._current = None
