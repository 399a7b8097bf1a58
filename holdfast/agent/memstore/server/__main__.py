"""``python -m holdfast.agent.memstore.server CONTROL LISTENING``: two descriptors, inherited from the agent.

Its settings, the job's token among them, come as the first message on the first descriptor, so that no other process can read them.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast.agent.memstore.server.handler import RequestHandler
from holdfast.agent.memstore.server.replica_store import ReplicaStore
from holdfast.agent.memstore.server.replicator import ReplicaNode, Replicator, TokenBucket
from holdfast.host.process import survive_sigterm
from holdfast.log import note, set_up
from holdfast.memstore.notification import SnapshotNotification
from holdfast.memstore.shared_memory import SUFFIX
from holdfast.memstore.store_folders import stream_of
from holdfast.protocol import LineBuffer, Message, encode

log = logging.getLogger("holdfast.agent.memstore")

SMALL_STACK: Final = 256 * 1024
REPORT_INTERVAL: Final = 1.0
"""Seconds between two reports to the agent of which replicas are complete."""


class MemstoreServer:
    """A memory server, in threads that mostly sleep."""

    def __init__(self, control: socket.socket, facts: Message) -> None:
        place = Path(facts["memstore"])
        self._control, self._sending = control, threading.Lock()
        self.replica_store = ReplicaStore(place, int(facts["limit"]))
        self.notification = SnapshotNotification(place)
        self.handler = RequestHandler(self.replica_store, facts["token"], self.send, self.tidy)
        self._facts, self._place = facts, place
        self._own: frozenset[int] | None = None
        self._bucket = TokenBucket()
        self._nodes: dict[tuple[str, int], ReplicaNode] = {}
        self._replicators: dict[tuple[int, tuple[str, int]], Replicator] = {}
        self._changing = threading.Lock()
        self._reported: dict[str, int] = {}
        self._next_report = 0.0

    def send(self, event: str, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        """Send an event to the controller, through the agent; when the agent exits this process ends anyway."""
        with self._sending, suppress(OSError):
            self._control.sendall(encode({"event": event, **facts}))

    def tidy(self) -> None:
        """Remove useless snapshots."""
        for name in self.replica_store.tidy(self._own):
            note(log, "memstore.removed", name=name)

    def take(self, message: Message) -> None:
        """Apply the agent's settings."""
        if "ranks" in message:
            self._own = frozenset(message["ranks"])
        if "replicate" in message:
            addresses = [(str(host), int(port)) for host, port in message["replicate"]]
            self._bucket.limit(message["bandwidth"])
            with self._changing:
                self._reported = {}  # the agent has forgotten the replicas too
                self._nodes = {one: self._nodes.get(one) or ReplicaNode(address=one, send=self.send) for one in addresses}
        with self._changing:
            for key in [key for key in self._replicators if key[1] not in self._nodes or key[0] not in (self._own or ())]:
                self._replicators.pop(key).stop()
        self.start_replicators()

    def start_replicators(self) -> None:
        """Start the missing replicators of this node's ranks."""
        facts = self._facts
        with self._changing:
            streams = [stream_of(path.name) for path in self._place.glob(f"*{SUFFIX}")]
            ranks = {stream.rank for stream in streams if stream is not None and not stream.source}
            for rank in ranks & (self._own or frozenset()):
                for address, node in self._nodes.items():
                    if (rank, address) not in self._replicators:
                        self._replicators[rank, address] = replicator = Replicator(
                            self._place,
                            rank,
                            node,
                            source=facts["node"],
                            token=facts["token"],
                            notification=self.notification,
                            bucket=self._bucket,
                        )
                        replicator.start()

    def watch(self) -> None:
        """Notice new ranks, for ever."""
        changed = 0
        while True:
            count = self.notification.count()
            with suppress(OSError):
                now = self._place.stat().st_mtime_ns  # a new file changes its folder
                if now != changed:
                    changed = now
                    self.start_replicators()
            self._report_replicas()
            self.notification.wait(count)

    def _report_replicas(self) -> None:
        """Report to the agent, now and then, the newest step of each rank that is complete on another node."""
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report = now + REPORT_INTERVAL
        newest: dict[str, int] = {}
        with self._changing:
            for (rank, _), replicator in self._replicators.items():
                if replicator.complete is not None:
                    newest[str(rank)] = max(replicator.complete, newest.get(str(rank), 0))
        if newest != self._reported:
            self._reported = newest
            self.send("replicas", ranks=newest)


def main() -> int:
    """Serve until the agent exits."""
    survive_sigterm()
    control, listening = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    set_up()
    try:  # run only when no other process wants the processor
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        with suppress(OSError):
            os.nice(19)
    threading.stack_size(SMALL_STACK)
    control.setblocking(True)  # noqa: FBT003 (its only argument)
    listening.setblocking(True)  # noqa: FBT003
    messages = _messages(control)
    server = MemstoreServer(control, next(messages))
    for loop in (server.notification.run, server.watch, lambda: server.handler.run(listening)):
        threading.Thread(target=loop, daemon=True).start()
    for message in messages:
        server.take(message)
    return 0


def _messages(control: socket.socket) -> Iterator[Message]:
    lines = LineBuffer()
    while data := control.recv(1 << 16):
        yield from lines.feed(data)


if __name__ == "__main__":
    os._exit(main())
