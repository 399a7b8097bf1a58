"""Keep training state in this node's memory: make and wipe the memory store, and run the server that replicates it to other nodes.

The store outlives workers and agents. The next agent of the same node and job uses what a killed one leaves. It is wiped by the next agent
of another job, by an agent that ends in order, and by the controller that releases the node.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.agent import schema
from holdfast.agent.node.identity import Identity
from holdfast.agent.sidecar import Sidecar, SidecarSpec
from holdfast.agent.workers.spawner import MemstoreSettings, SpawnPlan
from holdfast.host.ports import free_port
from holdfast.host.process import mark_of
from holdfast.log import note
from holdfast.memstore import shared_memory, store_folders, write_requests
from holdfast.protocol import Message

if TYPE_CHECKING:
    from holdfast.agent.memstore.writer_client import CheckpointWriterClient
    from holdfast.agent.workers.group import WorkerGroup

log = logging.getLogger("holdfast.agent")

CGROUP: Final = Path("/sys/fs/cgroup")
MEMORY: Final = Path("/proc/meminfo")
BACKLOG: Final = 64
SERVER_EVENTS: Final = frozenset({"memstore.full", "memstore.has-room", "replica.lost", "replica.restored"})
"""Events of the server that are passed on to the controller."""


class MemstoreServerClient:
    """The agent's end of the process that serves this node's memory store to other nodes.

    The agent holds the port: a restarted server listens on the same one, and connections made meanwhile wait a moment.
    """

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], helpers: set[int]) -> None:
        self._me, self._emit = me, emit
        self.replica_nodes: list[tuple[str, int]] = []
        """Where the snapshots of this node's ranks are copied to."""
        self.replicas: dict[str, int] = {}
        """Rank to the newest step of which one of them has a complete replica."""
        self._settings: Message = {}
        self._facts: Message = {}
        self._listening: socket.socket | None = None
        self._sidecar = Sidecar(
            SidecarSpec(
                name="memory",
                command=self._command,
                started=self._started,
                received=self._take,
                exited=self.replicas.clear,
                given_up=self._given_up,
            ),
            me,
            selector,
            helpers,
        )
        self.due, self.tick = self._sidecar.due, self._sidecar.tick

    @property
    def port(self) -> int | None:
        """Return the port on which other nodes connect to the server; None when there is none."""
        return None if self._listening is None else int(self._listening.getsockname()[1])

    def begin(self, place: Path, address: str, limit: int, token: str) -> None:
        """Serve the store at *place* under *address*, unless that is so already; raise ``OSError`` when it cannot be served."""
        facts = {
            "memstore": str(place),
            "limit": limit,
            "token": token,
            "node": store_folders.key_of(mark_of(self._me.directory)),
            "address": address,
        }
        if self._listening is not None and facts == self._facts:
            return
        self.end()
        self._facts = facts
        self._listening = _listen(address, place / "port")
        try:
            self._sidecar.begin()
        except OSError:
            self.end()
            raise

    def _command(self, descriptor: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        assert self._listening is not None
        listening = self._listening.fileno()
        return (sys.executable, "-m", "holdfast.agent.memstore.server", str(descriptor), str(listening)), (listening,)

    def _started(self) -> None:
        self._sidecar.send(self._facts)
        if self._settings:
            self._sidecar.send(self._settings)

    def replicate(self, nodes: list[tuple[str, int]], bandwidth: int | None) -> None:
        """Have the server copy the snapshots of this node's ranks to *nodes*."""
        if nodes != self.replica_nodes:
            self.replica_nodes = nodes
            self.replicas.clear()
        self._set({"replicate": [list(node) for node in nodes], "bandwidth": bandwidth})

    def set_ranks(self, ranks: list[int]) -> None:
        """Send the server the ranks of this node."""
        if ranks != self._settings.get("ranks"):
            self._set({"ranks": ranks})

    def _set(self, message: Message) -> None:
        self._settings |= message
        self._sidecar.send(message)

    def _take(self, message: Message) -> None:
        event = schema.text(message, "event")
        if event in SERVER_EVENTS:
            facts: dict[str, Any] = {name: schema.text(message, name) for name in ("why", "peer") if message.get(name) is not None}
            self._emit(event, **facts)
        elif event == "replicas":
            ranks = schema.mapping(message, "ranks")
            self.replicas.clear()
            self.replicas |= {rank: schema.integer(ranks, rank) for rank in ranks}

    def _given_up(self, why: str) -> None:
        self.end()
        self._emit("memstore.unavailable", what="server", why=f"its server: {why}")

    def end(self) -> None:
        """End the server and close its port."""
        self._sidecar.end()
        self.replicas.clear()
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._facts = {}


class MemstoreManager:
    """Owns the memory store of the job that this agent serves."""

    def __init__(
        self,
        me: Identity,
        selector: selectors.BaseSelector,
        emit: Callable[..., None],
        workers: WorkerGroup,
        checkpoint_writer: CheckpointWriterClient,
    ) -> None:
        self.checkpoint_writer = checkpoint_writer
        self._emit, self._workers = emit, workers
        self._mark = mark_of(me.directory)
        self._server = MemstoreServerClient(me, selector, emit, workers.helpers)
        self.replicate, self.due = self._server.replicate, self._server.due
        self.memstore: Path | None = None
        self.limit = 0
        """Bytes of memory for everything in the memory store."""
        for name in ("HOLDFAST_MEMSTORE", "HOLDFAST_MEMSTORE_LIMIT"):  # those of the process that started this agent
            os.environ.pop(name, None)

    def prepare(self, plan: SpawnPlan) -> None:
        """Make the memory store for the job, and have it served; a failure is reported, and training goes on without."""
        place = store_folders.memstore_of(self._mark, plan.job)
        for other in store_folders.memstores_of(self._mark):
            if other != place or plan.memory is None:
                store_folders.wipe(other)
        if plan.memory is None:
            self._server.end()
            self.memstore = None
        elif self.memstore is None:
            self._open(place, plan.memory)
        if self.memstore is not None and plan.memory is not None:
            try:
                token = plan.environment.get("HOLDFAST_TOKEN", "")
                if not token:
                    raise OSError(errno.EACCES, "the job has no token for connections between nodes")  # noqa: TRY301
                self._server.begin(self.memstore, plan.memory.address, self.limit, token)
            except OSError as error:
                self._unavailable(f"other nodes cannot be served from {plan.memory.address}: {error}", "server")
        self.checkpoint_writer.memstore = self.memstore
        variables = {"HOLDFAST_MEMSTORE": str(self.memstore), "HOLDFAST_MEMSTORE_LIMIT": str(self.limit), "HOLDFAST_CHECKPOINT_WRITER": "1"}
        self._workers.set_node_environment({} if self.memstore is None else variables)

    def _open(self, place: Path, settings: MemstoreSettings) -> None:
        try:
            store_folders.make(place)
            write_requests.reopen(place)
            room = available_bytes(place)
            limit = min(room, settings.limit) if settings.limit else room // 2
            if not limit:
                raise OSError(errno.ENOSPC, "no memory is free")  # noqa: TRY301 (one place that reports it)
        except OSError as error:
            store_folders.wipe(place)
            self._unavailable(f"no memory store can be made in {place.parent}: {error}", "memstore")
            return
        self.memstore, self.limit = place, limit

    def _unavailable(self, why: str, what: str) -> None:
        note(log, "memstore.unavailable", what=what, why=why)
        self._emit("memstore.unavailable", what=what, why=why)

    def about(self) -> dict[str, Any] | None:
        """Return what a controller needs to know of this node's memory store, if there is one."""
        if self.memstore is None:
            return None
        return {"port": self._server.port, "limit": self.limit, "to": [list(node) for node in self._server.replica_nodes]}

    def stored(self) -> list[dict[str, Any]]:
        """Return the complete snapshots in the memory store, as JSON has them."""
        if self.memstore is None:
            return []
        names = ("rank", "world", "step", "lineage")
        return [
            {"name": path.name, **{name: getattr(label, name) for name in names}}
            for path, label in shared_memory.labels(self.memstore).items()
        ]

    def replica(self, rank: int) -> int | None:
        """Return the newest step of which another node has a complete replica of a rank's snapshot."""
        return self._server.replicas.get(str(rank))

    def serves(self) -> bool:
        """Return whether other nodes can be served."""
        return self.memstore is not None and self._server.port is not None

    def tick(self, now: float) -> None:
        """Do what is due, and send the server the ranks of this node."""
        self._server.tick(now)
        self._server.set_ranks(sorted(self._workers.workers))

    def close(self, *, wipe: bool) -> None:
        """End the server; *wipe* the memory store unless a later agent may need it."""
        self._server.end()
        if wipe and self.memstore is not None:
            store_folders.wipe(self.memstore)


def _listen(address: str, port_file: Path) -> socket.socket:
    """Listen on a port of *address*: the one on which the memory store was served before, which other nodes know, or else any free one."""
    family, _, _, _, where = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    ports = [free_port() for _ in range(3)]
    with suppress(OSError, ValueError):
        ports.insert(0, int(port_file.read_text()))
    for number in ports:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((where[0], number, *where[2:]))
            sock.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            sock.close()
            last = error
            continue
        with suppress(OSError):
            port_file.write_text(str(number))
        return sock
    raise OSError(str(last)) from last


def available_bytes(place: Path) -> int:
    """Return the bytes of memory that the files in *place* can take, including those they have; raise ``OSError`` when unknown."""
    facts = os.statvfs(place)
    available = [int(line.split()[1]) * 1024 for line in MEMORY.read_text().splitlines() if line.startswith("MemAvailable:")]
    free = [facts.f_bavail * facts.f_frsize, *available, *_available_in_cgroups()]
    return max(0, min(free)) + store_folders.usage(place)


def _available_in_cgroups() -> list[int]:
    """Return the bytes that the memory cgroups of this process still allow it, as far as they can be read."""
    available = []
    with suppress(OSError, ValueError, IndexError, StopIteration):
        path = next(line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        inside = CGROUP / path.lstrip("/")
        for folder in dict.fromkeys((inside, *inside.parents)):
            if not folder.is_relative_to(CGROUP):
                break
            with suppress(OSError, ValueError):  # "max" is no number: no limit there
                limit, used = int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                reclaimable = int(statistics.get("inactive_file", 0))  # the kernel takes it back from files when it needs it
                available.append(limit - used + reclaimable)
    return available
