"""The store of a generation over sockets of our own: where ranks leave small values for each other while they come together.

torch's `TCPStore` looks the name of every peer up before a connection is of use, to have it for its log. Where the name service loses a
question now and then, that is five seconds and more in the middle of a recovery. Its connections also answer one question at a time, so
that a rank which waits for a value cannot ask for anything else meanwhile. Here names are never asked for, any number of threads may
wait on one connection, closing it ends all their waits, and who does not know the job's token is not let in.
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
from typing import Any, Final

import torch.distributed as dist

from holdfast.authenticated_listener import PendingCallers, open_port

_HEAD: Final = struct.Struct("!IBI")
"""Length of the parts, verb, number of the question."""
_PART: Final = struct.Struct("!I")
LONGEST: Final = 256 * 2**20
LONGEST_HELLO: Final = 4096
"""Bytes that a caller may send before it has proved that it knows the token."""
HELLO_SECONDS: Final = 5.0
MAX_UNAUTHENTICATED: Final = 32
"""Callers that have not proved it yet, and may take that long: while there are more they have a moment, so that nobody can use up the
process's descriptors."""
MOST_UNSENT: Final = 2 * LONGEST
"""Bytes of answers that a caller may leave unread before it is let go."""


class Verb(IntEnum):
    """What can be asked of a store."""

    HELLO = 0
    SET = 1
    GET = 2
    """Waits until all the keys are there; so does `WAIT`."""
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
    """Cuts what arrives into frames."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, list[bytes]]]:
        """Take in *data*; return the frames that are whole: verb, number, parts. Raise ``ValueError`` for nonsense."""
        self._data += data
        found = []
        while len(self._data) >= _HEAD.size:
            length, verb, number = _HEAD.unpack_from(self._data)
            if length > self.longest:
                raise ValueError("too long")
            if len(self._data) < _HEAD.size + length:
                break
            found.append((verb, number, _parts(bytes(self._data[_HEAD.size : _HEAD.size + length]))))
            del self._data[: _HEAD.size + length]
        return found


def _parts(body: bytes) -> list[bytes]:
    found, place = [], 0
    while place < len(body):
        (size,) = _PART.unpack_from(body, place)
        place += _PART.size
        if place + size > len(body):
            raise ValueError("a part is cut off")
        found.append(body[place : place + size])
        place += size
    return found


# -- serving ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _ClientConnection:
    """A connection as the server has it."""

    socket: socket.socket
    frames: _Frames = field(default_factory=lambda: _Frames(LONGEST_HELLO))
    known: bool = False
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A question that waits for keys."""

    caller: _ClientConnection
    verb: int
    number: int
    keys: list[bytes]
    missing: set[bytes]


class KvServer:
    """Hosts a store: one thread, any number of connections."""

    def __init__(self, port: int, token: str) -> None:
        """Listen on *port* (0: any). Raise ``DistNetworkError`` when that cannot be."""
        self._token = token.encode()
        try:
            self._listener = open_port(port, backlog=4096)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "?")
            raise dist.DistNetworkError(
                f"The server socket has failed to listen on port {port}: name: {name}, message: {error.strerror}"
            ) from error
        self.port = int(self._listener.getsockname()[1])
        self._values: dict[bytes, bytes] = {}
        self._verbs: dict[Verb, Callable[..., list[bytes]]] = {
            Verb.SET: self._set,
            Verb.CHECK: self._check,
            Verb.ADD: self._add,
            Verb.COMPARE: self._compare,
            Verb.DELETE: self._delete,
            Verb.COUNT: lambda: [b"%d" % len(self._values)],
            Verb.APPEND: self._append,
        }
        self._waiting: dict[bytes, list[_WaitingRequest]] = {}
        self._strangers = PendingCallers[_ClientConnection]()
        """Who has not proved yet that it knows the token."""
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._listener.settimeout(0)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="holdfast-store", daemon=True).start()

    def close(self) -> None:
        """Serve nobody any more."""
        with suppress(OSError):
            self._waker.send(b".")

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._strangers.due(MAX_UNAUTHENTICATED, HELLO_SECONDS)):
                if key.fileobj is self._wake:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._let_in()
                else:
                    self._pump(key.data, events)
            for late in self._strangers.late(MAX_UNAUTHENTICATED, HELLO_SECONDS):
                self._part(late)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._waker.close()

    def _let_in(self) -> None:
        try:
            line, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: without a pause this would be tried for ever, at a whole core's cost
            time.sleep(0.0 if len(self._strangers) else 0.01)
            for stranger in self._strangers:
                self._part(stranger)
            return
        caller = _ClientConnection(line)
        self._strangers.add(caller)
        try:
            line.settimeout(0)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(line, selectors.EVENT_READ, caller)
        except OSError:
            self._part(caller)

    def _pump(self, caller: _ClientConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(caller)
            if events & selectors.EVENT_READ:
                data = caller.socket.recv(1 << 18)
                if not data:
                    raise ConnectionError("closed")
                for verb, number, parts in caller.frames.feed(data):
                    self._hear(caller, verb, number, parts)
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError, KeyError, IndexError, struct.error):
            self._part(caller)

    def _part(self, caller: _ClientConnection) -> None:
        """Let go of a connection that ended or spoke nonsense, and of what it waits for."""
        self._strangers.discard(caller)
        with suppress(KeyError, ValueError):
            self._selector.unregister(caller.socket)
        caller.socket.close()
        for key, waiters in list(self._waiting.items()):
            self._waiting[key] = [one for one in waiters if one.caller is not caller]
            if not self._waiting[key]:
                del self._waiting[key]

    def _hear(self, caller: _ClientConnection, verb: int, number: int, parts: list[bytes]) -> None:
        if verb in (Verb.GET, Verb.WAIT) and caller.known:
            self._await(_WaitingRequest(caller, verb, number, parts, {key for key in parts if key not in self._values}))
        elif caller.known:
            self._answer(caller, number, *self._verbs[Verb(verb)](*parts))
        elif verb == Verb.HELLO and hmac.compare_digest(parts[0], self._token):
            caller.known, caller.frames.longest = True, LONGEST
            self._strangers.discard(caller)
            self._answer(caller, number)
        else:
            raise ValueError("a stranger")

    def _set(self, *parts: bytes) -> list[bytes]:
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            self._put(key, value)
        return []

    def _check(self, *keys: bytes) -> list[bytes]:
        return [b"1" if all(key in self._values for key in keys) else b"0"]

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        self._put(key, b"%d" % (int(self._values.get(key, b"0")) + int(amount)))
        return [self._values[key]]

    def _compare(self, key: bytes, expected: bytes, wanted: bytes) -> list[bytes]:
        if self._values.get(key, b"") == expected:
            self._put(key, wanted)
        return [self._values.get(key, expected)]

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        self._put(key, self._values.get(key, b"") + value)
        return []

    def _delete(self, key: bytes) -> list[bytes]:
        return [b"1" if self._values.pop(key, None) is not None else b"0"]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiting.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                self._fulfil(waiter)

    def _await(self, waiter: _WaitingRequest) -> None:
        if not waiter.missing:
            self._fulfil(waiter)
        for key in waiter.missing:
            self._waiting.setdefault(key, []).append(waiter)

    def _fulfil(self, waiter: _WaitingRequest) -> None:
        found = [self._values.get(key, b"") for key in waiter.keys] if waiter.verb == Verb.GET else []
        self._answer(waiter.caller, waiter.number, *found)

    def _answer(self, caller: _ClientConnection, number: int, *parts: bytes) -> None:
        caller.unsent += _frame(0, number, parts)
        with suppress(OSError):  # its end is seen when it is read
            if len(caller.unsent) > MOST_UNSENT:
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


# -- asking -----------------------------------------------------------------------------------------------------------

_alive: Final[list[KvStore]] = []
"""torch keeps the C++ half of a store; the half in Python must live as long."""


class KvStore(dist.Store):
    """A connection to a `KvServer`, as torch uses stores. Threads do not wait for each other in it."""

    def __init__(self, host: str, port: int, token: str, timeout: timedelta) -> None:
        """Connect. Raise ``OSError`` when nobody listens there, or does not let us in."""
        super().__init__()
        self.set_timeout(timeout)
        self._seconds = timeout.total_seconds()
        self._line = socket.create_connection((host, port), timeout=HELLO_SECONDS)
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host = str(self._line.getsockname()[0])
        """This process's own address, as the other end sees it."""
        self._frames, self._count = _Frames(), 0
        self._sending, self._news = threading.Lock(), threading.Condition()
        self._answers: dict[int, list[bytes]] = {}
        self.gone = ""
        """Why the connection is of no use any more."""
        self._patient: list[PatientStore] = []
        try:
            self._line.sendall(_frame(Verb.HELLO, 0, [token.encode()]))
            while not self._answers:
                self._take()
            self._line.settimeout(None)
        except BaseException:
            self._line.close()
            raise
        self._answers.clear()
        _alive.append(self)
        threading.Thread(target=self._read, name="holdfast-store-line", daemon=True).start()

    def _take(self) -> None:
        data = self._line.recv(1 << 18)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "Connection closed by peer")
        for _, number, parts in self._frames.feed(data):
            self._answers[number] = parts

    def _read(self) -> None:
        """Take answers in until the connection ends."""
        while True:
            try:
                data = self._line.recv(1 << 18)
                told = self._frames.feed(data) if data else None
            except (OSError, ValueError) as error:
                told, why = None, str(error)
            else:
                why = "Connection closed by peer"
            with self._news:
                if told is None:
                    self.gone = self.gone or why
                else:
                    self._answers.update({number: parts for _, number, parts in told})
                self._news.notify_all()
            if told is None:
                self._line.close()
                return

    def close(self, why: str = "Socket closed") -> None:
        """End the connection, and with it every wait in it."""
        with self._news:
            self.gone = self.gone or why
            self._news.notify_all()
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def with_timeout(self, timeout: timedelta) -> PatientStore:
        """Return this store for who waits longer in it: *timeout*, or until `end_long_waits`."""
        made = PatientStore(self, timeout)
        with self._news:
            self._patient.append(made)
        return made

    def end_long_waits(self, why: str) -> None:
        """End every wait of those who wait `with_timeout`: what they wait for will not come."""
        with self._news:
            for one in self._patient:
                one.gone = why
            self._patient.clear()
            self._news.notify_all()

    def _ask(self, verb: Verb, parts: Sequence[bytes], seconds: float | None = None) -> list[bytes]:
        """Ask, and wait for the answer; raise what torch's own store raises when there is none."""
        return self.ask(verb, parts, self._seconds if seconds is None else seconds, lambda: self.gone)

    def ask(self, verb: Verb, parts: Sequence[bytes], seconds: float, gone: Callable[[], str]) -> list[bytes]:
        """Ask, and wait for the answer at most so many *seconds*, and until there is a reason why it will not come: *gone*."""
        until = time.monotonic() + seconds
        try:
            with self._sending:
                self._count += 1
                number = self._count
                self._line.sendall(_frame(verb, number, parts))
        except OSError as error:
            raise dist.DistNetworkError(f"the store's connection ended: {self.gone or error}") from error
        with self._news:
            while number not in self._answers:
                if why := gone():
                    raise dist.DistNetworkError(f"the store's connection ended: {why}")
                left = until - time.monotonic()
                if left <= 0:
                    keys = ", ".join(part.decode(errors="replace") for part in parts[:3])
                    raise dist.DistStoreError(f"wait timeout, keys: {keys}")
                self._news.wait(left)
            return self._answers.pop(number)

    # -- what torch asks ----------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Leave *value* under *key*."""
        self._ask(Verb.SET, [key.encode(), _bytes(value)])

    def get(self, key: str) -> bytes:
        """Return what is under *key*; wait for it."""
        return self._ask(Verb.GET, [key.encode()])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return what is under each of *keys*; wait for all."""
        return self._ask(Verb.GET, [key.encode() for key in keys])

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Leave a value under each of *keys*."""
        self._ask(Verb.SET, [part for pair in zip(keys, values, strict=True) for part in (pair[0].encode(), _bytes(pair[1]))])

    def add(self, key: str, amount: int) -> int:
        """Add to the number under *key*; return it."""
        return int(self._ask(Verb.ADD, [key.encode(), b"%d" % amount])[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Append *value* to what is under *key*."""
        self._ask(Verb.APPEND, [key.encode(), _bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put *desired* under *key* if *expected* is there; return what is there then."""
        return self._ask(Verb.COMPARE, [key.encode(), _bytes(expected), _bytes(desired)])[0]

    def check(self, keys: list[str]) -> bool:
        """Tell whether there is something under all *keys*."""
        return self._ask(Verb.CHECK, [key.encode() for key in keys]) == [b"1"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until there is something under all *keys*."""
        self._ask(Verb.WAIT, [key.encode() for key in keys], None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Remove *key*; tell whether it was there."""
        return self._ask(Verb.DELETE, [key.encode()]) == [b"1"]

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._ask(Verb.COUNT, [])[0])

    def has_extended_api(self) -> bool:
        """Tell that it can append, and take several keys at once."""
        return True

    deleteKey = delete_key  # noqa: N815 (the names by which torch's C++ asks for them)
    getNumKeys = num_keys  # noqa: N815


class PatientStore(KvStore):
    """A store of which somebody takes that a value may be long in coming: the same connection, with a time-out of its own."""

    def __init__(self, root: KvStore, timeout: timedelta) -> None:
        dist.Store.__init__(self)
        self.set_timeout(timeout)
        self._root, self._seconds, self.host, self.gone = root, timeout.total_seconds(), root.host, ""
        _alive.append(self)

    def _ask(self, verb: Verb, parts: Sequence[bytes], seconds: float | None = None) -> list[bytes]:
        return self._root.ask(verb, parts, self._seconds if seconds is None else seconds, lambda: self._root.gone or self.gone)


def _bytes(value: Any) -> bytes:  # noqa: ANN401 (torch hands texts, bytes, and lists of numbers)
    return value.encode() if isinstance(value, str) else bytes(value)


def native_store(store: dist.Store, timeout: timedelta, *, host: str, serving: bool) -> dist.Store:
    """Return a store of torch's own, which one member hosts, found through *store*: NCCL's threads go on asking it, without Python."""
    if serving:
        made = dist.TCPStore("0.0.0.0", 0, is_master=True, timeout=timeout, wait_for_workers=False)  # noqa: S104 (other nodes must reach it)
        store.set("native_store", f"{host} {made.port}")
        return made
    at, port = store.get("native_store").decode().split()
    return dist.TCPStore(at, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
