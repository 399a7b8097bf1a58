"""The agent's part in keeping training state in its node's memory: it makes the memory store, wipes it, and has it served to other nodes.

The store outlives workers and agents. The next agent of the same node and job uses what a killed one leaves; the next agent of another job
wipes it, as do an agent that ends in order and the flow that releases the node.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.agent.memstore.server_client import MemstoreServerClient
from holdfast.agent.node.identity import Identity
from holdfast.agent.workers.spawner import MemstoreSettings, SpawnPlan
from holdfast.log import note
from holdfast.memstore import shared_memory, store_folders, write_requests
from holdfast.process import mark_of

if TYPE_CHECKING:
    from holdfast.agent.memstore.writer_client import CheckpointWriterClient
    from holdfast.agent.workers.group import WorkerGroup

log = logging.getLogger("holdfast.agent")

CGROUP: Final = Path("/sys/fs/cgroup")
MEMORY: Final = Path("/proc/meminfo")


class MemstoreManager:
    """Keeps the memory store of the job that this agent serves."""

    def __init__(
        self,
        me: Identity,
        selector: selectors.BaseSelector,
        emit: Callable[..., None],
        workers: WorkerGroup,
        checkpoint_writer: CheckpointWriterClient,
    ) -> None:
        self.checkpoint_writer = checkpoint_writer
        self._me, self._emit, self._workers = me, emit, workers
        self._mark = mark_of(me.directory)
        self._server = MemstoreServerClient(me, selector, emit, workers.helpers)
        self.memstore: Path | None = None
        self.limit = 0
        """Bytes of memory for everything in the memory store."""
        os.environ.pop("HOLDFAST_MEMSTORE", None)  # of whoever started us: it is none of ours
        os.environ.pop("HOLDFAST_MEMSTORE_LIMIT", None)

    def prepare(self, plan: SpawnPlan) -> None:
        """Make the memory store for the job, and have it served; what keeps us from it is told, and training goes on without."""
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
            self._serve(self.memstore, plan.memory, plan.environment.get("HOLDFAST_TOKEN", ""))
        self.checkpoint_writer.memstore = self.memstore
        self._workers.tell_of_node(self._environment())

    def _open(self, place: Path, plan: MemstoreSettings) -> None:
        try:
            store_folders.make(place)
            write_requests.reopen(place)
            limit = min(room(place), plan.limit) if plan.limit else room(place) // 2
            if not limit:
                raise OSError(errno.ENOSPC, "no memory is free")  # noqa: TRY301 (one place that tells of it)
        except OSError as error:
            store_folders.wipe(place)
            self._none(f"no memory store can be made in {place.parent}: {error}", "vault")
            return
        self.memstore, self.limit = place, limit

    def _serve(self, place: Path, plan: MemstoreSettings, token: str) -> None:
        try:
            if not token:
                raise OSError(errno.EACCES, "the job has no token by which nodes would know each other")  # noqa: TRY301
            self._server.begin(place, plan.address, self.limit, token)
        except OSError as error:
            self._none(f"other nodes cannot be served from {plan.address}: {error}", "server")

    def _none(self, why: str, what: str) -> None:
        note(log, "memstore.unavailable", what=what, why=why)
        self._emit("memstore.unavailable", what=what, why=why)

    def _environment(self) -> dict[str, str]:
        if self.memstore is None:
            return {}
        return {"HOLDFAST_MEMSTORE": str(self.memstore), "HOLDFAST_MEMSTORE_LIMIT": str(self.limit), "HOLDFAST_CHECKPOINT_WRITER": "1"}

    def about(self) -> dict[str, Any] | None:
        """Return what a flow must know of this node's memory, if it keeps anything there."""
        if self.memstore is None:
            return None
        return {"port": self._server.port, "limit": self.limit, "to": [list(home) for home in self._server.homes]}

    def stored(self) -> list[dict[str, Any]]:
        """Return what lies whole in the memory store, as JSON holds it."""
        if self.memstore is None:
            return []
        names = ("rank", "world", "step", "lineage")
        return [
            {"name": path.name, **{name: getattr(label, name) for name in names}}
            for path, label in shared_memory.labels(self.memstore).items()
        ]

    def replicate(self, homes: list[tuple[str, int]], bandwidth: int | None) -> None:
        """Have the snapshots of this node's ranks copied to *homes* (host and port each), at *bandwidth* bytes a second at most."""
        self._server.replicate(homes, bandwidth)

    def replica(self, rank: int) -> int | None:
        """Return the newest step of which another node is known to keep a whole replica of a rank's snapshot."""
        return self._server.replicas.get(str(rank))

    def serves(self) -> bool:
        """Tell whether other nodes can be served."""
        return self.memstore is not None and self._server.port is not None

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return self._server.due()

    def tick(self, now: float) -> None:
        """Do what is due, and let the server know whose ranks are here."""
        self._server.tick(now)
        self._server.own(sorted(self._workers.workers))

    def close(self, *, wipe: bool) -> None:
        """End the server; *wipe* the memory store unless a later agent may need what is in it."""
        self._server.end()
        if wipe and self.memstore is not None:
            store_folders.wipe(self.memstore)


# -- how much there is ----------------------------------------------------------------------------------------------------


def room(place: Path) -> int:
    """Return the bytes of memory that the files in *place* can take, those that they have among them; raise ``OSError`` when unknown."""
    facts = os.statvfs(place)
    available = [int(line.split()[1]) * 1024 for line in MEMORY.read_text().splitlines() if line.startswith("MemAvailable:")]
    free = [facts.f_bavail * facts.f_frsize, *available, *_left_in_cgroups()]
    return max(0, min(free)) + store_folders.usage(place)


def _left_in_cgroups() -> list[int]:
    """Return what the memory cgroups above this process leave it, as far as they can be seen."""
    left = []
    with suppress(OSError, ValueError, IndexError, StopIteration):
        path = next(line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        inside = CGROUP / path.lstrip("/")
        for folder in dict.fromkeys((inside, *inside.parents)):
            if not folder.is_relative_to(CGROUP):
                break
            with suppress(OSError, ValueError):  # "max" is no number: no limit there
                most, used = int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
                left.append(most - used + _given_back(folder))
    return left


def _given_back(folder: Path) -> int:
    """Return the bytes that the kernel takes back from a cgroup's files when it needs them."""
    for line in (folder / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
