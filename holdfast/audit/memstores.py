"""Where a job's snapshots lie in the memory of nodes, and how they come here to be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.cluster.local import LocalNodes
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.event_queue import EventQueue
from holdfast.control.config.worker_env import known_token
from holdfast.errors import OrderRefused, WorldError
from holdfast.memstore import client, shared_memory
from holdfast.memstore.shared_memory import Label, Snapshot, Unusable
from holdfast.process import mark_of

if TYPE_CHECKING:
    from holdfast.cluster import NodeBackend
    from holdfast.history import Job

HANDS: Final = 32
"""Nodes that are asked at once."""


class NodeMemory(Protocol):
    """The memory of one node."""

    def labels(self) -> dict[str, Label]:
        """Return the labels of what is whole there; raise ``OSError`` or `Unusable` when that cannot be had."""
        ...

    def spoilt(self) -> dict[str, str]:
        """Return the files that are neither whole nor in work, with what is wrong with each, as far as can be seen."""
        ...

    def bring(self, name: str, label: Label, into: Path) -> None:
        """Copy a snapshot to the file *into*; raise ``OSError`` when it cannot be had, `Unusable` when it is not what was asked for."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """A vault on this machine."""

    place: Path

    def labels(self) -> dict[str, Label]:
        """Return the labels, as they stand in the files."""
        return {path.name: label for path, label in shared_memory.labels(self.place).items()}

    def spoilt(self) -> dict[str, str]:
        """Return sealed files whose first page is not as it was written."""
        found = {}
        for path in sorted(self.place.glob(f"*{shared_memory.SUFFIX}")):
            with suppress(OSError):
                with path.open("rb") as file:
                    page = file.read(shared_memory.PAGE)
                try:
                    shared_memory.read_label(page)
                except Unusable as error:
                    if shared_memory.is_sealed(page):
                        found[path.name] = error.why
        return found

    def bring(self, name: str, label: Label, into: Path) -> None:
        """Copy the file, locked meanwhile: training takes another one, and would run out of them if it were read here for long."""
        with Snapshot(self.place / name) as held:
            if held.label != label:
                raise Unusable("another one has taken its place")
            with os.fdopen(os.dup(held.fileno()), "rb") as source, into.open("xb") as target:
                source.seek(0)
                shutil.copyfileobj(source, target, 2**20)


@dataclass(frozen=True, slots=True)
class There:
    """The memory server of another machine."""

    address: tuple[str, int]
    token: str

    def labels(self) -> dict[str, Label]:
        """Ask for the labels."""
        return client.labels(self.address, self.token)

    def spoilt(self) -> dict[str, str]:
        """Return nothing: a server tells of whole ones only."""
        return {}

    def bring(self, name: str, label: Label, into: Path) -> None:
        """Pull the file."""
        client.pull(self.address, self.token, name, label, into)


@dataclass(slots=True)
class ReachedStores:
    """The memory of a job's nodes."""

    memory: dict[str, NodeMemory] = field(default_factory=dict)
    away: dict[str, str] = field(default_factory=dict)
    """Nodes whose memory cannot be reached, and why."""


def reach(source: NodeBackend, job: Job, members: Iterable[str] = ()) -> ReachedStores:
    """Find the memory of all nodes that keep something of *job*: on this machine by itself, else through their agents.

    *members* hold its ranks, so that one of them which cannot be asked is worth telling.
    """
    if isinstance(source, LocalNodes):
        return _here(source, job)
    return _there(source, job, {*members, *(view.name for view in source.survey() if view.job == job.id)})


def _here(source: LocalNodes, job: Job) -> ReachedStores:
    found = ReachedStores()
    for node in source.names():
        place = shared_memory.vault_of(mark_of(source.folder(node)), job.id)
        if not place.exists():
            continue
        if os.access(place, os.R_OK | os.X_OK):
            found.memory[node] = Here(place)
        else:
            found.away[node] = f"{place} cannot be read"
    return found


def _there(source: NodeBackend, job: Job, nodes: Collection[str]) -> ReachedStores:
    """Ask the agents of *nodes*, all at once: each may take its time."""

    def ask(node: str) -> There | str | None:
        try:
            return _asked(source, node, job)
        except (OSError, WorldError) as error:
            return str(error)

    found = ReachedStores()
    with ThreadPoolExecutor(HANDS, thread_name_prefix="audit") as hands:
        for node, answer in zip(sorted(nodes), hands.map(ask, sorted(nodes)), strict=True):
            if isinstance(answer, str):
                found.away[node] = answer
            elif answer is not None:
                found.memory[node] = answer
    return found


def _asked(source: NodeBackend, node: str, job: Job) -> There | None:
    """Return how the memory of *node* is reached, as its agent says; nothing when it keeps nothing of the job."""
    channel = AgentClient(node, lambda: source.connect(node), EventQueue(), epoch=0)
    try:
        told = channel.about()
        token = known_token(job) or _token(channel, job)
    finally:
        channel.close()
    port = (told.get("memory") or {}).get("port")
    if told.get("job") != job.id or port is None:
        return None
    if not token:
        raise PermissionError("its agent does not tell the job's token: give it the same Holdfast as this one")
    return There((source.address(node), int(port)), token)


def _token(channel: AgentClient, job: Job) -> str:
    """Ask an agent for the job's token."""
    with suppress(OrderRefused):
        return str(channel.order("token", job=job.id)["token"])
    return ""


@contextmanager
def bench() -> Iterator[Path]:
    """Give a folder in memory, for this user alone, for what is being read; it is gone afterwards."""
    place = shared_memory.root() / f"audit-{os.getpid()}"
    shared_memory.make(place)
    try:
        yield place
    finally:
        shared_memory.wipe(place)
