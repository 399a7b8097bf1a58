"""``python -m holdfast.agent.memstore.server CONTROL LISTENING``: two descriptors, from the agent and shared with it.

What it is to serve, the job's token among it, comes as the first message on the first: nothing of it can be seen from outside.
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
from holdfast.agent.memstore.server.replicator import ReplicaNode, Replicator
from holdfast.agent.memstore.server.token_bucket import TokenBucket
from holdfast.log import set_up
from holdfast.memstore.notification import SnapshotNotification
from holdfast.memstore.shared_memory import SUFFIX
from holdfast.memstore.store_folders import stream_of
from holdfast.process import survive_sigterm
from holdfast.protocol import LineBuffer, Message, encode

SMALL_STACK: Final = 256 * 1024
TELL: Final = 1.0
"""Seconds between two words to the agent about how far replicas are."""


class MemstoreServer:
    """All of a memory server, in threads that mostly sleep."""

    def __init__(self, control: socket.socket, facts: Message) -> None:
        place = Path(facts["vault"])
        self._control, self._said = control, threading.Lock()
        self.replica_store = ReplicaStore(place, int(facts["limit"]))
        self.news = SnapshotNotification(place)
        self.serving = RequestHandler(self.replica_store, facts["token"], self.tell, self.tidy)
        self._facts, self._place = facts, place
        self._own: frozenset[int] | None = None
        self._bucket = TokenBucket()
        self._homes: dict[tuple[str, int], ReplicaNode] = {}
        self._pushers: dict[tuple[int, tuple[str, int]], Replicator] = {}
        self._changing = threading.Lock()
        self._told: dict[str, int] = {}
        self._next_word = 0.0

    def tell(self, event: str, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        """Tell the flow something, through the agent; an agent that is gone ends us anyway."""
        with self._said, suppress(OSError):
            self._control.sendall(encode({"event": event, **facts}))

    def tidy(self) -> None:
        """Remove what has become useless."""
        for name in self.replica_store.tidy(self._own):
            logging.getLogger("holdfast.agent.workers.oom").info("memory.removed %s", name)

    def take(self, message: Message) -> None:
        """Do as the agent says."""
        if "ranks" in message:
            self._own = frozenset(message["ranks"])
        if "replicate" in message:
            self._replicate(message)
        with self._changing:
            for key in [key for key in self._pushers if key[1] not in self._homes or key[0] not in (self._own or ())]:
                self._pushers.pop(key).stop()
        self.look()

    def _replicate(self, message: Message) -> None:
        homes = [(str(host), int(port)) for host, port in message["replicate"]]
        self._bucket.limit(message["bandwidth"])
        with self._changing:
            self._told = {}  # the agent knows nothing of what these homes keep
            self._homes = {address: self._homes.get(address) or ReplicaNode(address=address, tell=self.tell) for address in homes}

    def look(self) -> None:
        """Push what ranks there are to where they are to be pushed."""
        with self._changing:
            streams = [stream_of(path.name) for path in self._place.glob(f"*{SUFFIX}")]
            ranks = {stream.rank for stream in streams if stream is not None and not stream.source}
            for rank in ranks & (self._own or frozenset()):
                for address, home in self._homes.items():
                    if (rank, address) not in self._pushers:
                        self._start(rank, home)

    def _start(self, rank: int, home: ReplicaNode) -> None:
        facts = self._facts
        pusher = Replicator(self._place, rank, home, source=facts["node"], token=facts["token"], news=self.news, bucket=self._bucket)
        self._pushers[rank, home.address] = pusher
        pusher.start()

    def watch(self) -> None:
        """See new ranks come, for ever."""
        changed = 0
        while True:
            count = self.news.count()
            with suppress(OSError):
                now = self._place.stat().st_mtime_ns  # a new file changes its folder
                if now != changed:
                    changed = now
                    self.look()
            self._tell_replicas()
            self.news.wait(count)

    def _tell_replicas(self) -> None:
        """Tell the agent, now and then, the newest step of each rank that is whole on another node."""
        now = time.monotonic()
        if now < self._next_word:
            return
        self._next_word = now + TELL
        with self._changing:
            whole = [(str(rank), pusher.whole) for (rank, _), pusher in self._pushers.items() if pusher.whole is not None]
        told: dict[str, int] = {}
        for rank, step in whole:
            told[rank] = max(step, told.get(rank, 0))
        if told != self._told:
            self._told = told
            self.tell("replicas", ranks=told)


def main() -> int:
    """Serve until the agent hangs up."""
    survive_sigterm()
    control, listening = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    set_up()
    _yield_to_training()
    threading.stack_size(SMALL_STACK)
    control.setblocking(True)  # noqa: FBT003 (its only argument)
    listening.setblocking(True)  # noqa: FBT003
    messages = _messages(control)
    server = MemstoreServer(control, next(messages))
    for loop in (server.news.run, server.watch, lambda: server.serving.run(listening)):
        threading.Thread(target=loop, daemon=True).start()
    for message in messages:
        server.take(message)
    return 0


def _messages(control: socket.socket) -> Iterator[Message]:
    lines = LineBuffer()
    while data := control.recv(1 << 16):
        yield from lines.feed(data)


def _yield_to_training() -> None:
    """Run only when nobody else wants the processor."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        with suppress(OSError):
            os.nice(19)


if __name__ == "__main__":
    os._exit(main())
