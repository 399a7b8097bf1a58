"""Connect to the memory stores of a job's nodes: on this machine through their folders, on others through their agents."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from holdfast.cluster.local import LocalNodes
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.reactor import EventQueue
from holdfast.control.config.worker_env import known_token
from holdfast.errors import CommandRejected, WorldError
from holdfast.host.process import mark_of
from holdfast.memstore import store_folders
from holdfast.memstore.reader import LocalMemstore, MemstoreReader, RemoteMemstore

if TYPE_CHECKING:
    from holdfast.cluster import NodeBackend
    from holdfast.history import Job

NODES_AT_ONCE: Final = 32
"""Nodes that are queried at the same time."""


@dataclass(slots=True)
class ReachedStores:
    """The memory stores of a job's nodes."""

    stores: dict[str, MemstoreReader] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
    """Nodes whose memory cannot be reached, and why."""


def connect_stores(source: NodeBackend, job: Job, members: Iterable[str] = ()) -> ReachedStores:
    """Return the memory stores of all nodes that keep state of *job*: on this machine from their folders, else through their agents.

    *members* are the nodes of its ranks: one whose agent cannot be reached is reported as unreachable.
    """
    if isinstance(source, LocalNodes):
        return _local_stores(source, job)
    return _remote_stores(source, job, {*members, *(view.name for view in source.survey() if view.job == job.id)})


def _local_stores(source: LocalNodes, job: Job) -> ReachedStores:
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


def _remote_stores(source: NodeBackend, job: Job, nodes: Collection[str]) -> ReachedStores:
    def store_or_error(node: str) -> RemoteMemstore | str | None:
        try:
            return _remote_store(source, node, job)
        except (OSError, WorldError) as error:
            return str(error)

    found = ReachedStores()
    with ThreadPoolExecutor(NODES_AT_ONCE, thread_name_prefix="checkpoints") as pool:
        for node, answer in zip(sorted(nodes), pool.map(store_or_error, sorted(nodes)), strict=True):
            if isinstance(answer, str):
                found.unreachable[node] = answer
            elif answer is not None:
                found.stores[node] = answer
    return found


def _remote_store(source: NodeBackend, node: str, job: Job) -> RemoteMemstore | None:
    """Return the memory store of *node*, whose port its agent knows; None when it keeps nothing of the job."""
    client = AgentClient(node, lambda: source.connect(node), EventQueue(), epoch=0)
    try:
        facts = client.about()
        token = known_token(job) or ""
        if not token:
            with suppress(CommandRejected):
                token = str(client.send_command("token", job=job.id)["token"])
    finally:
        client.close()
    port = (facts.get("memory") or {}).get("port")
    if facts.get("job") != job.id or port is None:
        return None
    if not token:
        raise PermissionError("its agent does not give the job's token; install the same version of Holdfast there")
    return RemoteMemstore((source.address(node), int(port)), token)
