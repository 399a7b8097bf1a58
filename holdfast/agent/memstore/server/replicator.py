"""Send the snapshots of this node's ranks to their home on another node, while they are still being written.

One thread for each rank and home, each with a connection of its own: a small snapshot does not wait behind a huge one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from holdfast.agent.memstore.server.replica_store import order_of
from holdfast.agent.memstore.server.tail_reader import TailReader, newest
from holdfast.agent.memstore.server.token_bucket import TokenBucket
from holdfast.memstore.connection import ABANDON, DATA, FRAME, TAIL, MemstoreConnection, connect
from holdfast.memstore.notification import ReplicationProgress, SnapshotNotification
from holdfast.memstore.shared_memory import UnusableSnapshot

CHUNK: Final = 2**20
"""Bytes sent in one go at most; between two it is seen whether they are still wanted."""
CONNECT_SECONDS: Final = 10.0
SEND_SECONDS: Final = 60.0
"""Seconds for which a home may take nothing before it counts as gone."""
LOST_SECONDS: Final = 3.0
"""Seconds for which a home must be out of reach before that is told: who is replaced is no news by then."""
AGAIN_SECONDS: Final = 0.2
"""Seconds after which a home is asked again that had no file free."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0


@dataclass(slots=True, kw_only=True)
class ReplicaNode:
    """Another node's memory server, to which this node's snapshots go, as all of its connections find it."""

    address: tuple[str, int]
    tell: Callable[..., None]
    lost_seconds: float = LOST_SECONDS
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since: float | None = None
    _told: bool = False

    @property
    def name(self) -> str:
        """Return how the flow knows it."""
        return f"{self.address[0]}:{self.address[1]}"

    def missed(self, why: str) -> None:
        """Note that it could not be reached, or hung up; tell once, when that has lasted."""
        with self._lock:
            now = time.monotonic()
            self._since = self._since or now
            if not self._told and now - self._since >= self.lost_seconds:
                self._told = True
                self.tell("replica.lost", peer=self.name, why=why)

    def kept(self) -> None:
        """Note that a whole replica is there; tell if it was told that none could be."""
        with self._lock:
            self._since = None
            if self._told:
                self._told = False
                self.tell("replica.restored", peer=self.name)


class Replicator(threading.Thread):
    """Keeps one rank's newest snapshots on one home."""

    def __init__(  # noqa: PLR0913
        self, place: Path, rank: int, home: ReplicaNode, *, source: str, token: str, news: SnapshotNotification, bucket: TokenBucket
    ) -> None:
        """Push what rank *rank* writes in the memory store *place* to *home*, where it is called by this node's name *source*."""
        super().__init__(name=f"rank {rank} to {home.name}", daemon=True)
        self._place, self._rank, self._home, self._source, self._token = place, rank, home, source, token
        self._news, self._bucket = news, bucket
        self._line: MemstoreConnection | None = None
        self._over = threading.Event()
        self._last: tuple[int, int, float] | None = None
        """The newest snapshot that this connection has dealt with."""
        self._sender = ReplicationProgress(place, rank)
        self.pushed = 0
        """Bytes of data sent."""
        self.whole: int | None = None
        """The step of the newest snapshot that is known to be whole there."""

    def stop(self) -> None:
        """End it, whatever it waits for."""
        self._over.set()
        self._sender.end()
        self._news.wake()
        line = self._line
        if line is not None:
            with suppress(OSError):
                line.socket.shutdown(2)

    def run(self) -> None:
        """Push until told to stop."""
        pause = FIRST_PAUSE
        while not self._over.is_set():
            try:
                with connect(self._home.address, self._token, seconds=CONNECT_SECONDS) as line:
                    self._line = line
                    line.socket.settimeout(SEND_SECONDS)
                    line.request({"do": "puts", "source": self._source, "rank": self._rank})
                    self._last, pause = None, FIRST_PAUSE
                    self._sender.begin()
                    self._push_all(line)
            except (OSError, UnusableSnapshot, ValueError, KeyError, TypeError) as error:
                if not self._over.is_set():
                    self._home.missed(str(error) or type(error).__name__)
            self._over.wait(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    def _push_all(self, line: MemstoreConnection) -> None:
        while not self._over.is_set():
            count = self._news.count()
            found = newest(self._place, self._rank, self._last)
            if found is None:
                self._news.wait(count)
                continue
            with found as reading:
                self._push(line, reading)

    def _push(self, line: MemstoreConnection, reading: TailReader) -> None:
        """Push one snapshot, unless it is not taken."""
        line.send({"label": asdict(reading.label)})
        answer = line.receive()
        if answer.get("ok") is True:
            self._stream(line, reading)
        elif answer.get("again"):  # somebody reads what it would replace: the newest shall not be left out for that
            self._over.wait(AGAIN_SECONDS)
        else:
            self._last = order_of(reading.label)
            if answer.get("have"):
                self._note_whole(reading)

    def _stream(self, line: MemstoreConnection, reading: TailReader) -> None:
        """Send a snapshot as its bytes come to be there; give it up when it is given up."""
        sent = 0
        while not self._over.is_set():
            count = self._news.count()
            there = reading.look()
            if there is None:
                line.socket.sendall(FRAME.pack(ABANDON, 0))
                return
            if sent < there:
                sent += self._send(line, reading, sent, there)
            elif reading.whole:
                self._finish(line, reading)
                return
            elif self._overtaken(reading):
                line.socket.sendall(FRAME.pack(ABANDON, 0))
                return
            else:
                self._news.wait(count, reading.patience)

    def _overtaken(self, reading: TailReader) -> bool:
        """Tell whether the rank has begun another snapshot since: nobody goes on with this one, its worker has died over it."""
        found = newest(self._place, self._rank, order_of(reading.label))
        if found is not None:
            found.close()
        return found is not None

    def _send(self, line: MemstoreConnection, reading: TailReader, begin: int, end: int) -> int:
        size = self._bucket.take(min(end - begin, CHUNK))
        line.socket.sendall(FRAME.pack(DATA, size))
        done = reading.send(line.socket, begin, size)
        if done < size:  # it was cut off under us: the frame must be filled, the next look sees why
            line.socket.sendall(bytes(size - done))
        self.pushed += size
        self._sender.sent()
        return size

    def _finish(self, line: MemstoreConnection, reading: TailReader) -> None:
        tail = reading.tail()
        line.socket.sendall(FRAME.pack(TAIL, len(tail)))
        line.send(asdict(reading.label))
        line.socket.sendall(tail)
        answer = line.receive()
        self._last = order_of(reading.label)
        if answer.get("ok") is True:
            self._note_whole(reading)

    def _note_whole(self, reading: TailReader) -> None:
        self.whole = reading.label.step
        if not self._over.is_set():
            self._sender.complete(*reading.label.moment)
        self._home.kept()
