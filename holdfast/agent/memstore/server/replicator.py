"""Send the snapshots of this node's ranks to replica nodes while they are still being written.

One thread for each rank and replica node, each with a connection of its own: a small snapshot does not wait behind a huge one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from holdfast.agent.memstore.server.replica_store import order_of
from holdfast.memstore import shared_memory
from holdfast.memstore.connection import ABANDON, DATA, FRAME, TAIL, MemstoreConnection, connect
from holdfast.memstore.notification import ReplicationProgress, SnapshotNotification
from holdfast.memstore.shared_memory import PAGE, Label, UnusableSnapshot
from holdfast.memstore.store_folders import own_files

CHUNK: Final = 2**20
"""Bytes sent at once at most; between two chunks it is checked whether the snapshot is still wanted."""
CONNECT_SECONDS: Final = 10.0
SEND_SECONDS: Final = 60.0
"""Seconds for which a replica node may accept nothing before it counts as lost."""
LOST_SECONDS: Final = 3.0
"""Seconds for which a replica node must be unreachable before that is reported: one that is replaced is no news by then."""
AGAIN_SECONDS: Final = 0.2
"""Seconds until the next attempt with a replica node that had no free file."""
FIRST_PAUSE: Final = 0.1
MAX_PAUSE: Final = 5.0
SEALED_SECONDS: Final = 0.01
"""Seconds until the worker has certainly released a file that it has just sealed."""
PATIENCE: Final = 5.0
BURST_SECONDS: Final = 0.05
"""Seconds of sending that may be saved up: short, so that the limit holds at every moment, and ranks take turns."""
MIN_BURST: Final = 4096
MIN_SLEEP: Final = 0.0001
"""Seconds; a shorter sleep may not move the clock."""


class TokenBucket:
    """Limits how many bytes a node sends each second, over all replicators."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock, self._sleep = clock, sleep
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._rate: float | None = None
        self._tokens, self._at = 0.0, clock()

    def limit(self, rate: int | None) -> None:
        """Allow *rate* bytes a second from now on; None: any number."""
        with self._lock:
            self._rate, self._tokens, self._at = rate, 0.0, self._clock()

    def take(self, size: int) -> int:
        """Return how many of *size* bytes may be sent, at least one, as soon as it may. First come, first served."""
        with self._turn:
            while True:
                with self._lock:
                    if self._rate is None:
                        return size
                    now = self._clock()
                    burst = max(MIN_BURST, self._rate * BURST_SECONDS)
                    self._tokens, self._at = min(burst, self._tokens + (now - self._at) * self._rate), now
                    wanted = min(size, int(burst))
                    if self._tokens >= wanted:
                        self._tokens -= wanted
                        return wanted
                    pause = (wanted - self._tokens) / self._rate
                self._sleep(min(max(pause, MIN_SLEEP), 0.25))  # a new limit may come meanwhile


class TailReader:
    """Reads one snapshot while a worker writes it; the worker may begin another one in the same file at any time."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise `UnusableSnapshot` when it holds neither a draft nor a snapshot, ``OSError`` when it cannot be read."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.complete = False
        """It is sealed, and is not overwritten as long as this is open."""
        self.patience = PATIENCE
        self._chunk = bytearray()
        try:
            self.label, self.sealed, self.available = _first_page(self._file)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def poll(self) -> int | None:
        """Return how many bytes of data are there; None once this snapshot has been overwritten. A sealed one is locked from now on."""
        if not self.complete and not self._reread():
            return None
        if self.sealed and not self.complete:
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # its worker releases it in a moment, or has begun the next one there
                self.patience = SEALED_SECONDS
            else:
                if not self._reread():  # the lock came too late
                    return None
                self.complete = self.sealed
        return min(self.available, self.label.size)

    def _reread(self) -> bool:
        """Read the first page again; return whether the snapshot is still there."""
        try:
            label, self.sealed, self.available = _first_page(self._file)
        except UnusableSnapshot:
            return False
        same = replace(label, tail=0, digest="") == replace(self.label, tail=0, digest="")  # as it was when the snapshot was begun
        self.label = label if same else self.label
        return same

    def send(self, sock: socket.socket, begin: int, size: int) -> int:
        """Send *size* bytes of data from *begin*, at most a `CHUNK`; return how many there were.

        A copy of them: `sendfile` sends the pages themselves, which would arrive with what is in them by then. When this process is killed
        nothing locks the file, and the worker begins its next snapshot there while this one is on its way.
        """
        self._chunk = self._chunk or bytearray(CHUNK)
        with memoryview(self._chunk)[:size] as view:
            done = os.preadv(self._file, [view], PAGE + begin)
            sock.sendall(view[:done])
        return done

    def tail(self) -> bytes:
        """Return the tail of a complete snapshot; raise `UnusableSnapshot` when it is damaged."""
        tail = os.pread(self._file, self.label.tail, PAGE + self.label.size)
        if len(tail) != self.label.tail:
            raise UnusableSnapshot("it is cut off")
        return tail


def newest(place: Path, rank: int, after: tuple[int, int, float] | None) -> TailReader | None:
    """Return the snapshot of *rank* to send next, among those newer than *after*: the newest complete one, else the newest draft.

    Complete ones first: a slow replica node shall also get complete what it has begun.
    """
    found: list[TailReader] = []
    for path in own_files(place, rank):
        with suppress(OSError, UnusableSnapshot):
            found.append(TailReader(path))
    wanted = [one for one in found if after is None or order_of(one.label) > after]
    best = max(wanted, key=lambda one: (one.sealed, order_of(one.label)), default=None)
    for one in found:
        if one is not best:
            one.close()
    return best


def _first_page(file: int) -> tuple[Label, bool, int]:
    """Return the label, whether it is sealed, and how many bytes are there; raise `UnusableSnapshot` when there is no snapshot.

    The page is read twice: one read may have the old progress with the label of the worker's next snapshot.
    """
    before, page = os.pread(file, PAGE, 0), os.pread(file, PAGE, 0)
    if before[:8] != page[:8] or before[16:] != page[16:]:
        before, page = page, os.pread(file, PAGE, 0)
        if before[:8] != page[:8] or before[16:] != page[16:]:
            raise UnusableSnapshot("it is being changed")
    label = shared_memory.read_label(page, draft=True)
    sealed = shared_memory.is_sealed(page)
    return label, sealed, label.size if sealed else shared_memory.progress_of(page)


@dataclass(slots=True, kw_only=True)
class ReplicaNode:
    """Another node's memory server, to which this node's snapshots are sent, over all connections to it."""

    address: tuple[str, int]
    send: Callable[..., None]
    lost_seconds: float = LOST_SECONDS
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since: float | None = None
    _reported: bool = False

    @property
    def name(self) -> str:
        """Return how the controller calls it."""
        return f"{self.address[0]}:{self.address[1]}"

    def missed(self, why: str) -> None:
        """Note that it could not be reached, or disconnected; report that once, when it lasts."""
        with self._lock:
            now = time.monotonic()
            self._since = self._since or now
            if not self._reported and now - self._since >= self.lost_seconds:
                self._reported = True
                self.send("replica.lost", peer=self.name, why=why)

    def kept(self) -> None:
        """Note that it has a complete replica; report that if it was reported as lost."""
        with self._lock:
            self._since = None
            if self._reported:
                self._reported = False
                self.send("replica.restored", peer=self.name)


class Replicator(threading.Thread):
    """Keeps one rank's newest snapshots on one replica node."""

    def __init__(  # noqa: PLR0913
        self, place: Path, rank: int, node: ReplicaNode, *, source: str, token: str, notification: SnapshotNotification, bucket: TokenBucket
    ) -> None:
        """Send what rank *rank* writes in the memory store *place* to *node*, where it is stored under this node's name *source*."""
        super().__init__(name=f"rank {rank} to {node.name}", daemon=True)
        self._place, self._rank, self._node, self._source, self._token = place, rank, node, source, token
        self._notification, self._bucket = notification, bucket
        self._connection: MemstoreConnection | None = None
        self._stopped = threading.Event()
        self._last: tuple[int, int, float] | None = None
        """The newest snapshot that this connection has dealt with."""
        self._progress = ReplicationProgress(place, rank)
        self.sent = 0
        """Bytes of data sent."""
        self.complete: int | None = None
        """The step of the newest snapshot that is complete there."""

    def stop(self) -> None:
        """End it, whatever it waits for."""
        self._stopped.set()
        self._progress.end()
        self._notification.wake()
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.socket.shutdown(2)

    def run(self) -> None:
        """Send until stopped."""
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            try:
                with connect(self._node.address, self._token, seconds=CONNECT_SECONDS) as connection:
                    self._connection = connection
                    connection.socket.settimeout(SEND_SECONDS)
                    connection.request({"do": "puts", "source": self._source, "rank": self._rank})
                    self._last, pause = None, FIRST_PAUSE
                    self._progress.begin()
                    self._send_snapshots(connection)
            except (OSError, UnusableSnapshot, ValueError, KeyError, TypeError) as error:
                if not self._stopped.is_set():
                    self._node.missed(str(error) or type(error).__name__)
            self._stopped.wait(pause)
            pause = min(MAX_PAUSE, pause * 2)

    def _send_snapshots(self, connection: MemstoreConnection) -> None:
        while not self._stopped.is_set():
            count = self._notification.count()
            found = newest(self._place, self._rank, self._last)
            if found is None:
                self._notification.wait(count)
                continue
            with found as reader:
                connection.send({"label": asdict(reader.label)})
                answer = connection.receive()
                if answer.get("ok") is True:
                    self._stream(connection, reader)
                elif answer.get("again"):  # what it would replace is being read: the newest shall not be left out for that
                    self._stopped.wait(AGAIN_SECONDS)
                else:
                    self._last = order_of(reader.label)
                    if answer.get("have"):
                        self._note_complete(reader)

    def _stream(self, connection: MemstoreConnection, reader: TailReader) -> None:
        """Send a snapshot as its bytes are written; abandon it when its worker does."""
        sent = 0
        while not self._stopped.is_set():
            count = self._notification.count()
            available = reader.poll()
            if available is None:
                connection.socket.sendall(FRAME.pack(ABANDON, 0))
                return
            if sent < available:
                sent += self._send_chunk(connection, reader, sent, available)
            elif reader.complete:
                self._finish(connection, reader)
                return
            elif self._is_overtaken(reader):
                connection.socket.sendall(FRAME.pack(ABANDON, 0))
                return
            else:
                self._notification.wait(count, reader.patience)

    def _is_overtaken(self, reader: TailReader) -> bool:
        """Return whether another snapshot is to be sent before this draft: its worker has begun a newer one, so it is never completed.

        Or the one before was completed while `newest` looked from file to file: the worker may die over this draft.
        """
        found = newest(self._place, self._rank, self._last)
        if found is None:
            return False
        with found:
            return order_of(found.label) != order_of(reader.label)

    def _send_chunk(self, connection: MemstoreConnection, reader: TailReader, begin: int, end: int) -> int:
        size = self._bucket.take(min(end - begin, CHUNK))
        connection.socket.sendall(FRAME.pack(DATA, size))
        done = reader.send(connection.socket, begin, size)
        if done < size:  # the file was cut off meanwhile: the frame must be filled, the next poll sees why
            connection.socket.sendall(bytes(size - done))
        self.sent += size
        self._progress.sent()
        return size

    def _finish(self, connection: MemstoreConnection, reader: TailReader) -> None:
        tail = reader.tail()
        connection.socket.sendall(FRAME.pack(TAIL, len(tail)))
        connection.send(asdict(reader.label))
        connection.socket.sendall(tail)
        answer = connection.receive()
        self._last = order_of(reader.label)
        if answer.get("ok") is True:
            self._note_complete(reader)

    def _note_complete(self, reader: TailReader) -> None:
        self.complete = reader.label.step
        if not self._stopped.is_set():
            self._progress.complete(*reader.label.moment)
        self._node.kept()
