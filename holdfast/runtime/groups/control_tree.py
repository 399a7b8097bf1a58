"""The ranks' control tree: commit votes and gathered facts, over sockets that survive changes of members.

A vote at every step must not hang with the collectives that it judges, must end the moment the controller ends a generation, and a change
of one rank must cost a few connections whatever the size of the job. So it does not use gloo or NCCL.

Rank r is connected to its parent (r - 1) // `FAN_OUT` and its children, and to its *backup ranks*, which keep r's rank state (random
generators, position in the data) for the process that replaces r. Frames carry the generation; those of an older one are dropped unread.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from holdfast.runtime.groups.backends import GenerationEnded, poll_interval
from holdfast.runtime.groups.token_server import HELLO_SECONDS, MAX_HELLO, TokenServer

T = TypeVar("T")

FAN_OUT: Final = 32
"""Children of a rank: up to 33 ranks the tree is a star, up to 1,057 it has two levels."""

_HEAD: Final = struct.Struct("!IIBI")
"""Generation, number of the exchange in it, kind, length."""
_UP, _DOWN, _STATE, _FINAL_STATE, _HELLO, _STARTUP = range(6)
MAX_FRAME: Final = 256 * 1024 * 1024
CONNECT_SECONDS: Final = 20.0
"""How long connections may take in a recovery; a fault meanwhile is reported by the controller and does not wait for this."""


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
    error: str = ""
    """Why the connection is unusable."""

    def pump(self, events: int) -> None:
        """Receive and send what is possible now."""
        try:
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = self.socket.recv(1 << 20)
                if not data:
                    self.error = self.error or "closed by the peer"
                self.buffer += data
                self._parse()
            if self.unsent:
                sent = self.socket.send(self.unsent, socket.MSG_NOSIGNAL)
                del self.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self.error = self.error or (error.strerror or str(error))

    def _parse(self) -> None:
        while len(self.buffer) >= _HEAD.size:
            generation, number, kind, length = _HEAD.unpack_from(self.buffer)
            if length > MAX_FRAME:
                self.error = "it sent an invalid frame"
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
        """Return the body of a received frame, if it is there; drop frames of older exchanges, except rank states sent after one."""
        for place, (when, count, what, body) in enumerate(self.frames):
            if (when, count, what) == (generation, number, kind):
                del self.frames[place]
                return body
        self.frames = [frame for frame in self.frames if frame[:2] >= (generation, number) or frame[2] == _FINAL_STATE]
        return None

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


@dataclass(slots=True, eq=False)
class _PendingPeer:
    """A connection whose hello is not complete."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)

    def hello(self) -> bytes | None:
        """Receive the hello and nothing after it; return it when complete. Raise ``OSError`` or ``ValueError``."""
        with suppress(BlockingIOError):
            while True:
                length = _HEAD.unpack(self.received[: _HEAD.size])[3] if len(self.received) >= _HEAD.size else 0
                if length > MAX_HELLO:
                    raise ValueError("too long for a hello")
                missing = _HEAD.size + length - len(self.received)
                if not missing:
                    return bytes(self.received[_HEAD.size :])
                data = self.socket.recv(missing)
                if not data:
                    raise ConnectionError("closed")
                self.received += data
        return None


class PeerAcceptor(TokenServer[_PendingPeer]):
    """Accepts connections of other ranks that know the job's token, and holds them until they are fetched."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._accepted: dict[tuple[int, int], socket.socket] = {}
        self._closed = False
        self._lock = threading.Lock()
        super().__init__(0, backlog=256, name="holdfast-acceptor")

    def fetch(self, rank: int, incarnation: int) -> socket.socket | None:
        """Return the connection that this process of *rank* has made, if it has."""
        with self._lock:
            return self._accepted.pop((rank, incarnation), None)

    def _new_caller(self, connection: socket.socket) -> _PendingPeer:
        return _PendingPeer(connection)

    def _pump(self, caller: _PendingPeer, events: int) -> None:  # noqa: ARG002 (it only ever reads)
        """Accept a caller whose hello is complete; drop one that sends anything else."""
        try:
            hello = caller.hello()
            if hello is None:
                return
            key = self._identify(json.loads(hello))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            self._drop(caller)
            return
        self.authenticated(caller)
        self._selector.unregister(caller.socket)
        with self._lock:
            old: socket.socket | None = caller.socket
            if not self._closed:  # or it would never be fetched, nor closed
                old = self._accepted.pop(key, None)
                self._accepted[key] = caller.socket
        if old is not None:
            old.close()

    def _identify(self, hello: dict[str, Any]) -> tuple[int, int]:
        """Return rank and incarnation of a caller that knows the token; raise ``ValueError`` for others."""
        if not hmac.compare_digest(str(hello["token"]).encode(), self._token.encode()):
            raise ValueError("wrong token")
        return int(hello["rank"]), int(hello["incarnation"])

    def close(self) -> None:
        """Stop accepting, and close the connections that have not been fetched."""
        with self._lock:
            self._closed, unfetched = True, list(self._accepted.values())
            self._accepted.clear()
        for one in unfetched:
            one.close()
        super().close()


def call(address: tuple[str, int], token: str, rank: int, incarnation: int) -> socket.socket:
    """Connect to another rank's acceptor."""
    line = socket.create_connection(address, timeout=HELLO_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = json.dumps({"token": token, "rank": rank, "incarnation": incarnation}).encode()
    line.sendall(_HEAD.pack(0, 0, _HELLO, len(hello)) + hello)
    line.settimeout(0)
    return line


def backup_ranks_of(rank: int, size: int, stride: int, ranks: Sequence[int] | None = None) -> list[int]:
    """Return the two ranks that keep the rank state of *rank*: on other nodes, of *stride* ranks each, as far as there are any.

    Two, so that a rank and one of its backups may be lost at once; with two nodes they are two ranks of the other one. Where only some of
    the numbers below *size* are *ranks*, the next rank replaces one that is missing.
    """
    step = stride if size > stride else 1
    if ranks is not None and len(ranks) < size:
        found: list[int] = []
        for _ in range(2):
            start = (found or [rank])[-1] + step
            others = [other for other in ranks if other not in (rank, *found)]
            found += [min(others, key=lambda other: ((other - start) % size, other))] if others else []
        return found
    first, second = (rank + step) % size, (rank + 2 * step) % size
    if second == rank:
        second = first // step * step + (first + 1) % step
    return [one for one in dict.fromkeys((first, second)) if one != rank and one < size]


class ControlTree:
    """This rank's connections in one generation."""

    def __init__(self, rank: int, generation: int, incarnations: dict[int, int], stride: int) -> None:
        self.rank, self.generation, self.incarnations = rank, generation, incarnations
        ranks = sorted(incarnations)
        place, size = ranks.index(rank), max(ranks) + 1
        self.parent = None if place == 0 else ranks[(place - 1) // FAN_OUT]
        self.children = ranks[place * FAN_OUT + 1 : place * FAN_OUT + FAN_OUT + 1]
        self.backup_ranks = backup_ranks_of(rank, size, stride, ranks)
        self.protected_ranks = [other for other in ranks if rank in backup_ranks_of(other, size, stride, ranks)]
        """Ranks whose state this one stores."""
        self.peers: dict[int, TreePeer] = {}
        self._number = 0
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        self._cancelled = self._closed = False
        self._lock = threading.Lock()

    @property
    def neighbours(self) -> set[int]:
        """Ranks that this one is connected to."""
        found = {*self.children, *self.protected_ranks, *self.backup_ranks}
        return found if self.parent is None else found | {self.parent}

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

        The higher rank calls the lower. *find* returns the address of a rank's acceptor once it is known; all together may take *seconds*
        (default: `CONNECT_SECONDS`).
        Raise `GenerationEnded` when cancelled, `PeerConnectionLost` when the time is up.
        """
        if before is not None:
            self._take_connections(before)
        missing = self.neighbours - self.peers.keys()
        made = len(missing)
        began, limit = time.monotonic(), CONNECT_SECONDS if seconds is None else seconds
        while missing:
            for rank in sorted(missing):
                line = self._connect(rank, acceptor, token, find)
                if line is not None:
                    self.peers[rank] = TreePeer(rank, self.incarnations[rank], line)
                    missing.discard(rank)
            if missing:
                if self._cancelled:
                    raise GenerationEnded
                if time.monotonic() > began + limit:
                    raise PeerConnectionLost(min(missing), f"no connection within {limit:.0f} s")
                time.sleep(poll_interval(time.monotonic() - began))
        return made

    def _take_connections(self, before: ControlTree) -> None:
        """Take the connections of *before* whose two ends are the same processes as now; close the others."""
        for rank, peer in list(before.peers.items() if before.rank == self.rank else ()):
            if rank in self.neighbours and peer.incarnation == self.incarnations[rank] and not peer.error:
                self.peers[rank] = before.peers.pop(rank)
        before.close()

    def _connect(
        self, rank: int, acceptor: PeerAcceptor, token: str, find: Callable[[int], tuple[str, int] | None]
    ) -> socket.socket | None:
        if rank > self.rank:
            return acceptor.fetch(rank, self.incarnations[rank])
        address = find(rank)
        if address is not None:
            with suppress(OSError):
                return call(address, token, self.rank, self.incarnations[self.rank])
        return None

    def cancel(self) -> None:
        """Make every wait here raise `GenerationEnded`, now and from now on; callable from any thread."""
        self._cancelled = True
        with self._lock:
            if not self._closed:
                os.write(self._waker, b".")

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def vote(self, value: T, merge: Callable[[T, T], T], absent: T, state: bytes, keep: Callable[[int, bytes], None]) -> T:
        """Merge every rank's *value* as `reduce` does; a lost rank counts as *absent*, so that the others learn of it at once.

        Before its value this rank's *state* goes to its backup ranks, and *keep* is called with the states of the ranks that it protects:
        after a vote every rank state is on other nodes too.
        """
        self._number += 1
        for backup in self.backup_ranks:
            try:
                self._peer(backup).send(self.generation, self._number, _STATE, state)
            except PeerConnectionLost:  # the others wait for theirs all the same
                value = absent
        for rank in self.protected_ranks:
            try:
                received = self._await(rank, _STATE)
            except PeerConnectionLost:
                value = absent
                continue
            peer = self.peers[rank]
            for frame in [frame for frame in peer.frames if frame[2] == _FINAL_STATE]:
                peer.frames.remove(frame)
                if frame[0] == self.generation:  # an older one is of a step that may have been undone since
                    keep(rank, frame[3])
            keep(rank, received)
        return self._merge(value, merge, absent)

    def exchange(self, own: Callable[[int], bytes], keep: Callable[[int, bytes], None]) -> None:
        """Send ``own(rank)`` to each backup rank, and call *keep* with what protected ranks send, unless it is empty."""
        self._number += 1
        for backup in self.backup_ranks:
            self._peer(backup).send(self.generation, self._number, _STARTUP, own(backup))
        for rank in self.protected_ranks:
            received = self._await(rank, _STARTUP)
            if received:
                keep(rank, received)
        self._flush()

    def send_final_state(self, state: bytes) -> None:
        """Send the backup ranks a rank state that changed after the vote, without waiting."""
        for backup in self.backup_ranks:
            with suppress(PeerConnectionLost):
                self._peer(backup).send(self.generation, self._number, _FINAL_STATE, state)

    def drain(self, keep: Callable[[int, bytes], None], keep_record: Callable[[int, bytes], None]) -> None:
        """Call *keep*, or *keep_record*, with unread data that protected ranks sent before they exited."""
        for rank in self.protected_ranks:
            peer = self.peers.get(rank)
            size = -1
            while peer is not None and size != len(peer.buffer) + len(peer.frames):  # also where sending has failed: it sent before
                size = len(peer.buffer) + len(peer.frames)
                peer.pump(select.POLLIN)
            for generation, _, kind, body in [] if peer is None else sorted(peer.frames, key=lambda one: one[1]):
                if kind in (_STATE, _FINAL_STATE) and generation == self.generation:
                    keep(rank, body)
                elif kind == _STARTUP and generation == self.generation and body:
                    keep_record(rank, body)

    def reduce(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Merge every rank's *value* (JSON) into one that all ranks return. Raise `PeerConnectionLost` or `GenerationEnded`."""
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
        result = json.dumps(value).encode()
        for child in self.children:
            if absent is None or not self.peers[child].error:
                self._peer(child).send(self.generation, self._number, _DOWN, result)
        self._flush()
        return value

    def gather(self, value: Any) -> dict[int, Any]:  # noqa: ANN401 (anything JSON holds)
        """Return every rank's *value* (JSON), by rank. Raise `PeerConnectionLost` or `GenerationEnded`."""
        found = self.reduce({str(self.rank): value}, lambda one, other: {**one, **other})
        return {int(rank): found[rank] for rank in sorted(found, key=int)}

    def _peer(self, rank: int) -> TreePeer:
        peer = self.peers[rank]
        if peer.error:
            raise PeerConnectionLost(rank, peer.error)
        return peer

    def _await(self, rank: int, kind: int) -> bytes:
        """Wait for a frame from *rank*."""
        while (body := self.peers[rank].take(self.generation, self._number, kind)) is None:
            self._peer(rank)
            self._poll()
        return body

    def _flush(self) -> None:
        """Wait until everything has been sent."""
        while any(peer.unsent and not peer.error for peer in self.peers.values()):
            self._poll()

    def _poll(self) -> None:
        """Wait for any peer; raise `GenerationEnded` when cancelled."""
        if self._cancelled:
            raise GenerationEnded
        poll, by_fd = select.poll(), {}
        poll.register(self._wake, select.POLLIN)
        for peer in self.peers.values():
            if not peer.error:
                poll.register(peer.socket, select.POLLIN | (select.POLLOUT if peer.unsent else 0))
                by_fd[peer.socket.fileno()] = peer
        for fd, events in poll.poll(1000):
            if fd in by_fd:
                by_fd[fd].pump(events)

    def close(self) -> None:
        """Close all remaining connections."""
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake)
                os.close(self._waker)
