"""Reach the memory stores of a job's nodes: on this machine by their folders, on others through their agents."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from holdfast.cluster.local import LocalNodes
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.event_queue import EventQueue
from holdfast.control.config.worker_env import known_token
from holdfast.errors import CommandRejected, WorldError
from holdfast.memstore import store_folders
from holdfast.memstore.reader import LocalMemstore, MemstoreReader, RemoteMemstore
from holdfast.process import mark_of

if TYPE_CHECKING:
    from holdfast.cluster import NodeBackend
    from holdfast.history import Job

NODES_AT_ONCE: Final = 32
"""Nodes that are asked at the same time."""


@dataclass(slots=True)
class ReachedStores:
    """The memory stores of a job's nodes."""

    stores: dict[str, MemstoreReader] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
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
        place = store_folders.memstore_of(mark_of(source.folder(node)), job.id)
        if not place.exists():
            continue
        if os.access(place, os.R_OK | os.X_OK):
            found.stores[node] = LocalMemstore(place)
        else:
            found.unreachable[node] = f"{place} cannot be read"
    return found


def _there(source: NodeBackend, job: Job, nodes: Collection[str]) -> ReachedStores:
    """Ask the agents of *nodes*, all at once: each may take its time."""

    def ask(node: str) -> RemoteMemstore | str | None:
        try:
            return _asked(source, node, job)
        except (OSError, WorldError) as error:
            return str(error)

    found = ReachedStores()
    with ThreadPoolExecutor(NODES_AT_ONCE, thread_name_prefix="checkpoints") as pool:
        for node, answer in zip(sorted(nodes), pool.map(ask, sorted(nodes)), strict=True):
            if isinstance(answer, str):
                found.unreachable[node] = answer
            elif answer is not None:
                found.stores[node] = answer
    return found


def _asked(source: NodeBackend, node: str, job: Job) -> RemoteMemstore | None:
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
    return RemoteMemstore((source.address(node), int(port)), token)


def _token(channel: AgentClient, job: Job) -> str:
    """Ask an agent for the job's token."""
    with suppress(CommandRejected):
        return str(channel.send_command("token", job=job.id)["token"])
    return ""
