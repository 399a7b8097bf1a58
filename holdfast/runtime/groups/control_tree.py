"""The ranks' own small talk: votes, and gathering facts, over a tree of sockets that survives changes of members.

A vote at every step must not hang with the collectives that it judges, must be given up the moment the flow ends a generation, and
a change of one rank must cost a few connections whatever the size of the job. So it does not go through gloo or NCCL.

Rank r is connected to its parent (r - 1) // `FAN_OUT`, to its children, and to its *backup ranks*, which keep r's per-rank state (random
generators, position in the data) for the process that takes r's place. Frames carry the generation; what is left of an older one is dropped unread.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from holdfast.authenticated_listener import PendingCallers, open_port
from holdfast.runtime.groups.backends import GenerationEnded, pause_after

T = TypeVar("T")

FAN_OUT: Final = 32
"""Children of a rank: up to 33 ranks it is a star, up to 1,057 two levels."""

_HEAD: Final = struct.Struct("!IIBI")
"""Generation, number of the talk in it, kind, length."""
_UP, _DOWN, _LIGHT, _FINAL, _HELLO, _STARTUP = range(6)
LONGEST: Final = 256 * 1024 * 1024
LONGEST_HELLO: Final = 4096
HELLO_SECONDS: Final = 5.0
MAX_UNAUTHENTICATED: Final = 32
"""Callers that have not proved yet that they know the token, and may take that long: while there are more they have a moment."""
CONNECT_SECONDS: Final = 20.0
"""How long connections may take to be made in a recovery; faults meanwhile are told by the flow and do not wait for this."""


class PeerConnectionLost(Exception):
    """The connection to another rank ended."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why

    def __str__(self) -> str:
        return f"the connection to rank {self.rank} ended: {self.why}"


@dataclass(slots=True, eq=False)
class TreePeer:
    """A connection to another rank's process."""

    rank: int
    incarnation: int
    socket: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    frames: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    unsent: bytearray = field(default_factory=bytearray)
    gone: str = ""

    def pump(self, events: int) -> None:
        """Take in and send what can be now."""
        try:
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = self.socket.recv(1 << 20)
                if not data:
                    self.gone = self.gone or "closed by the peer"
                self.buffer += data
                self._cut()
            if self.unsent:
                sent = self.socket.send(self.unsent, socket.MSG_NOSIGNAL)
                del self.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self.gone = self.gone or (error.strerror or str(error))

    def _cut(self) -> None:
        while len(self.buffer) >= _HEAD.size:
            generation, number, kind, length = _HEAD.unpack_from(self.buffer)
            if length > LONGEST:
                self.gone = "it sent nonsense"
                return
            if len(self.buffer) < _HEAD.size + length:
                return
            self.frames.append((generation, number, kind, bytes(self.buffer[_HEAD.size : _HEAD.size + length])))
            del self.buffer[: _HEAD.size + length]

    def send(self, generation: int, number: int, kind: int, body: bytes) -> None:
        """Send a frame, or as much of it as the connection takes now."""
        self.unsent += _HEAD.pack(generation, number, kind, len(body)) + body
        self.pump(0)

    def take(self, generation: int, number: int, kind: int) -> bytes | None:
        """Return the body of a frame that has arrived; drop those of older generations."""
        for place, (when, count, what, body) in enumerate(self.frames):
            if (when, count, what) == (generation, number, kind):
                del self.frames[place]
                return body
        self.frames = [frame for frame in self.frames if frame[:2] >= (generation, number)]
        return None

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


@dataclass(slots=True, eq=False)
class _PendingPeer:
    """One who has not said yet who it is, and what it has said so far."""

    socket: socket.socket
    said: bytearray = field(default_factory=bytearray)

    def hello(self) -> bytes | None:
        """Take in what has come of the hello, and nothing after it; return it once it is whole. Raise ``OSError`` or ``ValueError``."""
        with suppress(BlockingIOError):
            while True:
                length = _HEAD.unpack(self.said[: _HEAD.size])[3] if len(self.said) >= _HEAD.size else 0
                if length > LONGEST_HELLO:
                    raise ValueError("too long for a hello")
                missing = _HEAD.size + length - len(self.said)
                if not missing:
                    return bytes(self.said[_HEAD.size :])
                data = self.socket.recv(missing)
                if not data:
                    raise ConnectionError("closed")
                self.said += data
        return None


class PeerAcceptor:
    """Where other ranks of the job knock: a listening socket and one thread, which lets in who knows the job's token."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._server = open_port(0, backlog=256)
        self.port = int(self._server.getsockname()[1])
        self._waiting: dict[tuple[int, int], socket.socket] = {}
        self._strangers = PendingCallers[_PendingPeer]()
        self._closed = False
        self._lock = threading.Condition()
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._server.settimeout(0)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="holdfast-desk", daemon=True).start()

    def fetch(self, rank: int, incarnation: int) -> socket.socket | None:
        """Return the connection that this process of *rank* has made, if it has."""
        with self._lock:
            return self._waiting.pop((rank, incarnation), None)

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(self._strangers.due(MAX_UNAUTHENTICATED, HELLO_SECONDS)):
                if key.fileobj is self._server:
                    self._accept()
                elif key.data is not None:
                    self._listen(key.data)
            for late in self._strangers.late(MAX_UNAUTHENTICATED, HELLO_SECONDS):
                self._hang_up(late)
        for caller in self._strangers:
            self._hang_up(caller)
        self._selector.close()
        for one in (self._wake, self._waker):
            one.close()

    def _accept(self) -> None:
        try:
            line, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:  # no descriptor is left, or hardly any
                time.sleep(0.0 if len(self._strangers) else 0.01)
                for caller in self._strangers:
                    self._hang_up(caller)
            return
        caller = _PendingPeer(line)
        try:
            line.settimeout(0)
            self._selector.register(line, selectors.EVENT_READ, caller)
        except OSError:
            line.close()
        else:
            self._strangers.add(caller)

    def _listen(self, caller: _PendingPeer) -> None:
        """Let a caller in once it has said who it is; hang up on one who says something else."""
        if caller.socket.fileno() < 0:  # hung up on in this very round
            return
        try:
            hello = caller.hello()
            if hello is None:
                return
            key = self._known(json.loads(hello))
            caller.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            self._hang_up(caller)
            return
        self._strangers.discard(caller)
        self._selector.unregister(caller.socket)
        with self._lock:
            old: socket.socket | None = caller.socket
            if not self._closed:  # else nobody would ever fetch it, nor close it
                old = self._waiting.pop(key, None)
                self._waiting[key] = caller.socket
        if old is not None:
            old.close()

    def _hang_up(self, caller: _PendingPeer) -> None:
        self._strangers.discard(caller)
        if caller.socket.fileno() >= 0:
            self._selector.unregister(caller.socket)
            caller.socket.close()

    def _known(self, told: dict[str, Any]) -> tuple[int, int]:
        """Return which process of which rank calls, if it knows the token."""
        if not hmac.compare_digest(str(told["token"]).encode(), self._token.encode()):
            raise ValueError("a stranger")
        return int(told["rank"]), int(told["incarnation"])

    def close(self) -> None:
        """Let nobody in any more, and hang up on those that nobody has fetched."""
        with self._lock:
            self._closed, left = True, list(self._waiting.values())
            self._waiting.clear()
        self._server.close()
        with suppress(OSError):  # closed before
            self._waker.send(b".")
        for caller in left:
            caller.close()


def call(address: tuple[str, int], token: str, rank: int, incarnation: int) -> socket.socket:
    """Connect to another rank's desk."""
    line = socket.create_connection(address, timeout=HELLO_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = json.dumps({"token": token, "rank": rank, "incarnation": incarnation}).encode()
    line.sendall(_HEAD.pack(0, 0, _HELLO, len(hello)) + hello)
    line.settimeout(0)
    return line


def parent_of(rank: int) -> int | None:
    """Return whom *rank* votes to."""
    return None if rank == 0 else (rank - 1) // FAN_OUT


def children_of(rank: int, size: int) -> list[int]:
    """Return who votes to *rank*."""
    return [child for child in range(rank * FAN_OUT + 1, rank * FAN_OUT + FAN_OUT + 1) if child < size]


def buddies_of(rank: int, size: int, stride: int, ranks: Sequence[int] | None = None) -> list[int]:
    """Return who keeps the light state of *rank*: two ranks on other nodes, of *stride* ranks each, as far as there are any.

    Two, so that a rank and one of its buddies may be lost at once; on two nodes they are two ranks of the other one. Where only some of the
    numbers below *size* are *ranks*, who follows takes the part of one that is not there.
    """
    if ranks is not None and len(ranks) < size:
        return _buddies_among(ranks, rank, size, stride)
    step = stride if size > stride else 1
    first, second = (rank + step) % size, (rank + 2 * step) % size
    if second == rank:
        second = first // step * step + (first + 1) % step
    return [one for one in dict.fromkeys((first, second)) if one != rank and one < size]


def _buddies_among(ranks: Sequence[int], rank: int, size: int, stride: int) -> list[int]:
    """Return the buddies of *rank* where some places are vacant."""
    found: list[int] = []
    for _ in range(2):
        start = (found or [rank])[-1] + (stride if size > stride else 1)
        others = [other for other in ranks if other not in (rank, *found)]
        found += [min(others, key=lambda other: ((other - start) % size, other))] if others else []
    return found


class ControlTree:
    """This rank's connections in one generation."""

    def __init__(self, rank: int, generation: int, incarnations: dict[int, int], stride: int) -> None:
        self.rank, self.generation, self.incarnations = rank, generation, incarnations
        ranks = sorted(incarnations)
        place, size = ranks.index(rank), max(ranks) + 1
        above = parent_of(place)
        self.parent = None if above is None else ranks[above]
        self.children = [ranks[child] for child in children_of(place, len(ranks))]
        self.backup_ranks = buddies_of(rank, size, stride, ranks)
        self.protected_ranks = [other for other in ranks if rank in buddies_of(other, size, stride, ranks)]
        self.peers: dict[int, TreePeer] = {}
        self._number = 0
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        self._given_up = self._closed = False
        self._lock = threading.Lock()

    @property
    def neighbours(self) -> set[int]:
        """Ranks that this one is connected to."""
        found = {*self.children, *self.protected_ranks}
        return found | {*self.backup_ranks} | ({self.parent} if self.parent is not None else set())

    def connect_neighbours(
        self,
        before: ControlTree | None,
        acceptor: PeerAcceptor,
        token: str,
        find: Callable[[int], tuple[str, int] | None],
        *,
        seconds: float | None = None,
    ) -> int:
        """Keep the connections of *before* that are still right, make the others; return how many were made.

        The higher rank calls the lower. *find* gives the address of a rank's desk, once it is known; all may take *seconds* to come,
        or as long as in a recovery. Raise `GenerationEnded` when given up.
        """
        if before is not None:
            self._inherit(before)
        missing = self.neighbours - self.peers.keys()
        made = len(missing)
        began, most = time.monotonic(), CONNECT_SECONDS if seconds is None else seconds
        while missing:
            for rank in sorted(missing):
                line = self._reach(rank, acceptor, token, find)
                if line is not None:
                    self.peers[rank] = TreePeer(rank, self.incarnations[rank], line)
                    missing.discard(rank)
            if missing:
                if self._given_up:
                    raise GenerationEnded
                if time.monotonic() > began + most:
                    raise PeerConnectionLost(min(missing), f"no connection came about within {most:.0f} s")
                time.sleep(pause_after(time.monotonic() - began))
        return made

    def _inherit(self, before: ControlTree) -> None:
        """Take over the connections of *before* whose two ends are the same processes as then."""
        for rank, peer in list(before.peers.items() if before.rank == self.rank else ()):
            if rank in self.neighbours and peer.incarnation == self.incarnations[rank] and not peer.gone:
                self.peers[rank] = before.peers.pop(rank)
        before.close()

    def _reach(self, rank: int, acceptor: PeerAcceptor, token: str, find: Callable[[int], tuple[str, int] | None]) -> socket.socket | None:
        if rank > self.rank:
            return acceptor.fetch(rank, self.incarnations[rank])
        address = find(rank)
        if address is None:
            return None
        with suppress(OSError):
            return call(address, token, self.rank, self.incarnations[self.rank])
        return None

    def give_up(self) -> None:
        """Have whoever waits here raise `GenerationEnded`, now and from now on; callable from any thread."""
        self._given_up = True
        with self._lock:
            if not self._closed:
                os.write(self._waker, b".")

    # -- talking ------------------------------------------------------------------------------------------------------

    def vote(self, value: T, merge: Callable[[T, T], T], absent: T, rank_state: bytes, keep: Callable[[int, bytes], None]) -> T:
        """Merge every rank's *value* as `reduce` does; a rank that is gone counts as *absent*, so that the others learn of it at once.

        Before its value this rank's *rank_state* goes to its backup ranks, and *keep* is given those of the ranks that it backs up: what a
        vote for a step returns means that every per-rank state is in other places too.
        """
        self._number += 1
        for buddy in self.backup_ranks:
            try:
                self._peer(buddy).send(self.generation, self._number, _LIGHT, rank_state)
            except PeerConnectionLost:  # the others wait for theirs all the same
                value = absent
        for rank in self.protected_ranks:
            try:
                told = self._await(rank, _LIGHT)
            except PeerConnectionLost:
                value = absent
            else:
                self._keep_finals(rank, keep)
                keep(rank, told)
        return self._merge(value, merge, absent)

    def exchange(self, own: Callable[[int], bytes], keep: Callable[[int, bytes], None]) -> None:
        """Send each buddy *own* of it, and give *keep* what the wards send: nothing where they have sent it before."""
        self._number += 1
        for buddy in self.backup_ranks:
            self._peer(buddy).send(self.generation, self._number, _STARTUP, own(buddy))
        for rank in self.protected_ranks:
            told = self._await(rank, _STARTUP)
            if told:
                keep(rank, told)
        self._flush()

    def send_final_state(self, rank_state: bytes) -> None:
        """Tell the buddies that the light state has changed since the vote; nobody waits for that."""
        for buddy in self.backup_ranks:
            with suppress(PeerConnectionLost):
                self._peer(buddy).send(self.generation, self._number, _FINAL, rank_state)

    def _keep_finals(self, rank: int, keep: Callable[[int, bytes], None]) -> None:
        peer = self.peers[rank]
        for frame in [frame for frame in peer.frames if frame[2] == _FINAL]:
            peer.frames.remove(frame)
            if frame[0] == self.generation:  # an older one is of a step that may have been taken back since
                keep(rank, frame[3])

    def leftovers(self, keep: Callable[[int, bytes], None], keep_record: Callable[[int, bytes], None]) -> None:
        """Give *keep*, or *keep_record*, what wards have sent before their end and nobody has read."""
        for rank in self.protected_ranks:
            peer = self.peers.get(rank)
            size = -1
            while peer is not None and not peer.gone and size != len(peer.buffer) + len(peer.frames):
                size = len(peer.buffer) + len(peer.frames)
                peer.pump(select.POLLIN)
            for frame in [] if peer is None else sorted(peer.frames, key=lambda one: one[1]):
                if frame[2] in (_LIGHT, _FINAL) and frame[0] == self.generation:
                    keep(rank, frame[3])
                elif frame[2] == _STARTUP and frame[0] == self.generation and frame[3]:
                    keep_record(rank, frame[3])

    def reduce(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Merge every rank's *value* (anything JSON holds) into one that all ranks return."""
        self._number += 1
        return self._merge(value, merge, None)

    def _merge(self, value: T, merge: Callable[[T, T], T], absent: T | None) -> T:
        for child in self.children:
            try:
                value = merge(value, json.loads(self._await(child, _UP)))
            except PeerConnectionLost:
                if absent is None:
                    raise
                value = merge(value, absent)
        if self.parent is not None:
            self._peer(self.parent).send(self.generation, self._number, _UP, json.dumps(value).encode())
            value = json.loads(self._await(self.parent, _DOWN))
        told = json.dumps(value).encode()
        for child in self.children:
            if absent is None or not self.peers[child].gone:
                self._peer(child).send(self.generation, self._number, _DOWN, told)
        self._flush()
        return value

    def gather(self, value: Any) -> dict[int, Any]:  # noqa: ANN401 (anything JSON holds)
        """Return every rank's *value*, by rank."""
        found = self.reduce({str(self.rank): value}, lambda one, other: {**one, **other})
        return {int(rank): found[rank] for rank in sorted(found, key=int)}

    def _peer(self, rank: int) -> TreePeer:
        peer = self.peers[rank]
        if peer.gone:
            raise PeerConnectionLost(rank, peer.gone)
        return peer

    def _await(self, rank: int, kind: int) -> bytes:
        """Wait for a frame from *rank*."""
        peer = self.peers[rank]
        while (body := peer.take(self.generation, self._number, kind)) is None:
            if peer.gone:
                raise PeerConnectionLost(rank, peer.gone)
            self._poll()
        return body

    def _flush(self) -> None:
        """Wait until everything said has left."""
        while any(peer.unsent and not peer.gone for peer in self.peers.values()):
            self._poll()

    def _poll(self) -> None:
        """Wait for news from anybody; raise `GenerationEnded` when given up."""
        if self._given_up:
            raise GenerationEnded
        poll, by_fd = select.poll(), {}
        poll.register(self._wake, select.POLLIN)
        for peer in self.peers.values():
            if not peer.gone:
                poll.register(peer.socket, select.POLLIN | (select.POLLOUT if peer.unsent else 0))
                by_fd[peer.socket.fileno()] = peer
        for fd, events in poll.poll(1000):
            if fd in by_fd:
                by_fd[fd].pump(events)

    def close(self) -> None:
        """Close all connections that are left."""
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake)
                os.close(self._waker)
