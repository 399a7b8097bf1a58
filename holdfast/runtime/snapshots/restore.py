"""Restore the state from the memory of nodes: list the snapshots, fetch them, verify them, and load them into the training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from holdfast.memstore import shared_memory
from holdfast.memstore.reader import LocalMemstore, MemstoreReader, RemoteMemstore
from holdfast.memstore.shared_memory import Snapshot
from holdfast.runtime.checkpoint.manifest import NOT_INVALIDATED, InvalidatedSteps
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.snapshots.checksum import fill
from holdfast.runtime.snapshots.restore_planner import Fetch, NoPlan, RestorePlan, SnapshotRef, new_holdings, plan, shards_by_rank
from holdfast.runtime.state.state_layout import StateLayout, load_state
from holdfast.runtime.state.tensors import bytes_of, fills_its_memory, local_of
from holdfast.runtime.state.training import Training

if TYPE_CHECKING:
    from holdfast.runtime.world import World

LIST_SECONDS: Final = (1.0, 5.0)
"""Timeouts for listing the memory of the nodes that have no rank: all of them at first, then those that have not answered.

A second suffices for a server that has something to do, and no longer is waited for one whose node is gone. Where the restore fails without
them, a busy server is given more time: what it holds is worth more than some seconds.
"""
_LISTED_AT_ONCE: Final = 32
"""Servers that are asked at the same time."""
FETCH_SECONDS: Final = 10.0
"""Seconds without a byte after which fetching from another node fails."""


class RestoreError(RuntimeError):
    """A snapshot that cannot be used after all: which, and *why*."""

    def __init__(self, snapshot: SnapshotRef, why: str) -> None:
        super().__init__(snapshot, why)
        self.snapshot, self.why = snapshot, why

    def __str__(self) -> str:
        one = self.snapshot
        return f"the snapshot of rank {one.rank} at step {one.step} in the memory of {one.node} cannot be used: {self.why}"

    def report(self) -> None:
        """Report it to the agent and in the log."""
        error = StorageError("snapshot-spoiled", str(self))
        StorageErrorReporter().report(error, self.snapshot.step, Path(self.snapshot.name))


class SnapshotSource:
    """The memory stores that this process can read: that of its own node, and through their servers those of other nodes."""

    def __init__(self, own: Path | None, node: str, servers: Mapping[str, tuple[str, int]], token: str) -> None:
        self.own, self.node, self.servers, self._token = own, node, servers, token
        self.invalidated = NOT_INVALIDATED
        """Complete states from which training must not resume."""
        self.unusable: set[tuple[str, str, int, int]] = set()
        """Snapshots that were found unusable: node, name, step, lineage."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> SnapshotSource:
        """Return the memory stores that *environment* names."""
        place = environment.get("HOLDFAST_MEMSTORE")
        servers: dict[str, tuple[str, int]] = {}
        with suppress(ValueError, AttributeError):
            servers = servers_of(json.loads(environment.get("HOLDFAST_MEMORY_SERVERS") or "{}"))
        source = cls(Path(place) if place else None, environment.get("HOLDFAST_NODE", ""), servers, environment.get("HOLDFAST_TOKEN", ""))
        source.invalidated = InvalidatedSteps.of(environment)
        return source

    def listed(self, world: int) -> list[dict[str, Any]]:
        """Return the snapshots in this node's memory for a job of *world* ranks, as JSON values."""
        return [] if self.own is None else _listed(self.node, LocalMemstore(self.own), world)

    def facts(self, world: int) -> dict[str, Any]:
        """Return what this process sends to the others about the memory that it can read, as JSON values."""
        snapshots, unusable = self.listed(world), sorted(self.unusable)
        address, servers = self.servers.get(self.node), sorted(self.servers)
        return {"node": self.node, "at": address, "stored": snapshots, "unusable": unusable, "servers": servers}

    def merge_facts(
        self,
        facts: Sequence[Mapping[str, Any]],
        world: int,
        *,
        lowest: bool,
        gather: Callable[[dict[str, Any]], Iterable[Any]],
        suffices: Callable[[set[SnapshotRef]], bool],
    ) -> set[SnapshotRef]:
        """Return the snapshots in the memory of all reachable nodes, the same on every rank; called by all ranks together.

        Args:
            facts: those of each rank, with the addresses of the servers on the others' nodes.
            world: number of ranks that the job has.
            lowest: whether this rank is the lowest one, which lists the memory of nodes without a rank.
            gather: exchanges a value of each rank.
            suffices: whether all ranks can be restored from these snapshots, the same on every rank. If they cannot, servers that have not
                answered are asked once more, with a longer timeout.
        """
        self.servers = {**self.servers, **servers_of({str(one["node"]): one["at"] for one in facts if one["at"] is not None})}
        listed, nodes = [one["stored"] for one in facts], {str(one["node"]) for one in facts}
        unusable = [item for one in facts for item in one["unusable"]]
        found = self.usable(listed, unusable)
        silent = sorted({node for one in facts for node in one["servers"]} - nodes)
        for seconds in LIST_SECONDS:
            if not silent:
                break
            for answer in gather(self._ask(silent, world, seconds) if lowest else {}):
                listed += answer.get("stored", [])
                silent = answer.get("silent", silent)
            found = self.usable(listed, unusable)
            if silent and suffices(found):  # planning costs time: only where somebody is left to ask
                break
        return found

    def _ask(self, nodes: Sequence[str], world: int, seconds: float) -> dict[str, Any]:
        """Return the snapshots on each of *nodes* as ``stored``, and as ``silent`` the nodes whose servers did not answer."""
        known = [node for node in nodes if node in self.servers]
        stored, silent = [], []
        with ThreadPoolExecutor(_LISTED_AT_ONCE, "holdfast-list") as pool:
            asked = {node: pool.submit(_listed, node, self._server(node, seconds), world) for node in known}
            for node, answer in asked.items():
                try:
                    stored.append(answer.result())
                except (OSError, shared_memory.UnusableSnapshot):
                    silent.append(node)
        return {"stored": stored, "silent": silent}

    def usable(self, listed: Iterable[Iterable[Mapping[str, Any]]], unusable: Iterable[Sequence[Any]] = ()) -> set[SnapshotRef]:
        """Return all *listed* snapshots, each once, without those that are unusable or invalidated."""
        bad = self.unusable | {(str(node), str(name), int(step), int(lineage)) for node, name, step, lineage in unusable}
        found = {SnapshotRef(**one) for items in listed for one in items}
        return {
            one
            for one in found
            if (one.node, one.name, one.step, one.lineage) not in bad and not self.invalidated.covers(one.step, one.lineage)
        }

    def open(self, snapshot: SnapshotRef) -> Snapshot:
        """Open a snapshot, fetched from its node if necessary; raise `RestoreError` when that fails."""
        try:
            found = Snapshot(self.own / snapshot.name) if snapshot.node == self.node and self.own is not None else self._fetched(snapshot)
        except (OSError, shared_memory.UnusableSnapshot) as error:
            raise self.mark_unusable(snapshot, str(error)) from error
        if found.label.moment == snapshot.moment and (found.label.shard, found.label.part) == (snapshot.shard, snapshot.part):
            return found
        found.close()
        raise self.mark_unusable(snapshot, shared_memory.REPLACED)

    def mark_unusable(self, snapshot: SnapshotRef, why: str) -> RestoreError:
        """Never use this snapshot again; return the error to raise."""
        self.unusable.add((snapshot.node, snapshot.name, snapshot.step, snapshot.lineage))
        return RestoreError(snapshot, why)

    def _fetched(self, snapshot: SnapshotRef) -> Snapshot:
        """Fetch a snapshot from another node, into this node's memory store, or a temporary file where there is none."""
        if snapshot.node not in self.servers:
            raise shared_memory.UnusableSnapshot(f"the address of the memory server of {snapshot.node} is unknown")
        folder = self.own if self.own is not None else Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 (made by exclusive creation, no link followed, mode 0600)
        into = folder / f"fetched-{os.getpid()}-{time.monotonic_ns()}{shared_memory.SUFFIX}"
        server = self._server(snapshot.node, FETCH_SECONDS)
        label = server.labels().get(snapshot.name)
        if label is None or label.moment != snapshot.moment:
            raise shared_memory.UnusableSnapshot(shared_memory.REPLACED)
        try:
            server.fetch(snapshot.name, label, into)
            return Snapshot(into)
        finally:
            into.unlink(missing_ok=True)  # an open file stays until it is closed

    def _server(self, node: str, seconds: float) -> RemoteMemstore:
        return RemoteMemstore(self.servers[node], self._token, seconds, seconds)

    def forget_newer(self, step: int, lineage: int) -> None:
        """Discard snapshots newer than *step* on this node: training resumes from there, and will do those steps again."""
        if self.own is None:
            return
        for path, label in shared_memory.labels(self.own).items():
            if label.step > step and label.lineage <= lineage:
                with suppress(OSError):
                    slot = shared_memory.Slot(path)
                    slot.discard()
                    slot.close()


def servers_of(addresses: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, int]]:
    """Return host and port of each node's memory server, from JSON values."""
    return {node: (str(host), int(port)) for node, (host, port) in addresses.items()}


def _listed(node: str, store: MemstoreReader, world: int) -> list[dict[str, Any]]:
    return [asdict(SnapshotRef.of(node, name, label)) for name, label in store.labels().items() if label.world == world]


class Restorer:
    """Loads fetched snapshots into the training of this rank."""

    def __init__(self, training: Training, memory: SnapshotSource) -> None:
        self._training, self._memory = training, memory

    def take(self, fetch: Fetch, apply_rank_state: Callable[[bytes], None]) -> int:
        """Restore the state that *fetch* names; return the bytes read. Raise `RestoreError` when a part of it is damaged.

        The training is not changed before all parts are at hand and their indexes agree. A slice with a wrong checksum leaves the state
        incomplete: the caller must restore it again, from elsewhere.
        """
        with ExitStack() as opened:
            parts = [(one, opened.enter_context(self._memory.open(one))) for one in fetch.parts]
            own = opened.enter_context(self._memory.open(fetch.rank_state)) if fetch.rank_state is not None else None
            size = self._fill(parts, own) if parts else 0
            if own is not None:
                apply_rank_state(own.blobs["rank_state"])
        return size

    def _fill(self, parts: Sequence[tuple[SnapshotRef, Snapshot]], own: Snapshot | None) -> int:
        """Fill the training's tensors: large ones from all parts, small values from the rank's *own* snapshot if there is one."""
        first = parts[0][1]
        for ref, one in parts:
            if one.entries != first.entries:
                raise self._memory.mark_unusable(ref, "its index differs from that of the other parts")
        existing = StateLayout(self._training).tensors
        device = next((one.device for one in self._training.model.parameters()), torch.device("cpu"))
        found = {entry.key: _tensor_for(existing.get(entry.key), entry, device) for entry in first.entries}
        flats = [bytes_of(one) for one in found.values()]
        size = 0
        for ref, one in parts:
            try:
                size += fill(flats, one)
            except shared_memory.UnusableSnapshot as error:
                raise self._memory.mark_unusable(ref, error.why) from error
        small = (own if own is not None else first).blobs
        load_state(self._training, small["static"], small["dynamic"], found, device)
        return size


def _tensor_for(existing: Tensor | None, entry: shared_memory.Entry, device: torch.device) -> Tensor:
    """Return the training's own tensor where it fits, else an empty one."""
    if existing is not None:
        one = local_of(existing)
        alike = tuple(one.shape) == entry.shape and str(one.dtype).removeprefix("torch.") == entry.dtype
        if alike and tuple(one.stride()) == entry.full_strides and fills_its_memory(one):
            return existing
    return torch.empty_strided(entry.shape, entry.full_strides, dtype=getattr(torch, entry.dtype), device=device)


def from_memory(
    training: Training, memory: SnapshotSource, world: World, newest: int, apply_rank_state: Callable[[bytes], None]
) -> RestorePlan | None:
    """Restore all ranks, which are new processes, to the newest complete step above *newest* in the memory of nodes.

    Called by all ranks together. Return the plan, or None when there is no such step. A damaged snapshot is reported and left out, and the
    next step is tried.
    """
    while True:
        facts = world.gather(memory.facts(world.size))
        nodes = [str(one["node"]) for one in facts]

        def plan_with(snapshots: set[SnapshotRef], nodes: Sequence[str] = nodes) -> RestorePlan | None:
            planned = plan(new_holdings(shards_by_rank(snapshots), nodes), (), snapshots)
            return None if isinstance(planned, NoPlan) or planned.step <= newest else planned

        found = plan_with(
            memory.merge_facts(
                facts, world.size, lowest=world.rank == 0, gather=world.gather, suffices=lambda snapshots: plan_with(snapshots) is not None
            )
        )
        if found is None:
            return None
        mine, why = next(fetch for fetch in found.fetches if fetch.target == world.rank), ""
        try:
            Restorer(training, memory).take(mine, apply_rank_state)
        except RestoreError as error:
            error.report()
            why = str(error)
        if not any(world.gather(why)):
            return found
