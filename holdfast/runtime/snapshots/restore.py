"""Go back to what lies in the memory of nodes: list it, bring it here, check it, and put it into the training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.memstore import shared_memory
from holdfast.memstore.reader import LocalMemstore, MemstoreReader, RemoteMemstore
from holdfast.memstore.shared_memory import Snapshot
from holdfast.runtime.checkpoint.invalidated import NOTHING, WrittenOff
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.snapshots.checksum import fill
from holdfast.runtime.snapshots.restore_planner import Fetch, SnapshotRef
from holdfast.runtime.state.state_layout import StateLayout, load_state
from holdfast.runtime.state.tensors import bytes_of, fills_its_memory, local_of
from holdfast.runtime.state.training import Training

ASK_SECONDS: Final = 1.0
"""How long a node that holds no rank may take to list its memory."""
FETCH_SECONDS: Final = 10.0
"""How long another node's memory may be silent."""


class RestoreError(RuntimeError):
    """A snapshot that cannot be used after all: which, and *why*."""

    def __init__(self, stored: SnapshotRef, why: str) -> None:
        super().__init__(stored, why)
        self.stored, self.why = stored, why

    def __str__(self) -> str:
        one = self.stored
        return f"the snapshot of rank {one.rank} at step {one.step} in the memory of {one.node} cannot be used: {self.why}"


def tell(spoiled: RestoreError) -> None:
    """Tell the agent, and whoever reads this rank's output, of a snapshot that could not be used."""
    one = spoiled.stored
    StorageErrorReporter().tell(StorageError("snapshot-spoiled", str(spoiled)), one.step, Path(one.name))


class SnapshotSource:
    """The memory stores that this process can reach: its own node's, and through their servers those of other nodes."""

    def __init__(self, own: Path | None, node: str, servers: Mapping[str, tuple[str, int]], token: str) -> None:
        self.own, self.node, self.servers, self._token = own, node, servers, token
        self.off = NOTHING
        """What nobody goes on from, though it is whole."""
        self.spoiled: set[tuple[str, str, int, int]] = set()
        """Snapshots that were found unusable: node, name, step, lineage."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> SnapshotSource:
        """Return what *environment* names."""
        place = environment.get("HOLDFAST_MEMSTORE")
        servers: dict[str, tuple[str, int]] = {}
        with suppress(ValueError, AttributeError):
            servers = servers_of(json.loads(environment.get("HOLDFAST_MEMORY_SERVERS") or "{}"))
        made = cls(Path(place) if place else None, environment.get("HOLDFAST_NODE", ""), servers, environment.get("HOLDFAST_TOKEN", ""))
        made.off = WrittenOff.of(environment)
        return made

    def listed(self, world: int) -> list[dict[str, Any]]:
        """Return what lies in this node's memory store for a job of *world* ranks, as JSON holds it."""
        return [] if self.own is None else _listed(self.node, LocalMemstore(self.own), world)

    def listed_elsewhere(self, world: int, nodes: Iterable[str]) -> list[dict[str, Any]]:
        """List the memory stores of nodes other than *nodes*, those that hold no rank now. One that does not answer has nothing."""
        found = []
        for node in sorted(self.servers.keys() - set(nodes)):
            with suppress(OSError, shared_memory.UnusableSnapshot):
                found += _listed(node, self._server(node, ASK_SECONDS), world)
        return found

    def told(self, world: int) -> dict[str, Any]:
        """Return what this process tells the others of the memory that it can reach, as JSON holds it."""
        stored, spoiled = self.listed(world), sorted(self.spoiled)
        return {"node": self.node, "at": self.servers.get(self.node), "stored": stored, "spoiled": spoiled, "servers": sorted(self.servers)}

    def reached(
        self, told: Sequence[Mapping[str, Any]], world: int, *, lowest: bool, gather: Callable[[list[dict[str, Any]]], Iterable[Any]]
    ) -> set[SnapshotRef]:
        """Return the snapshots in the memory of all nodes that can be reached, the same on every rank; all ranks together.

        *told*: what each rank has `told`; from it this process learns where the memory of the others' nodes is served. Nodes that hold no
        rank are asked by the *lowest* one, and *gather* gives its answer to all.
        """
        self.servers = {**self.servers, **servers_of({str(one["node"]): one["at"] for one in told if one["at"] is not None})}
        listed, nodes = [one["stored"] for one in told], {str(one["node"]) for one in told}
        if {node for one in told for node in one["servers"]} - nodes:
            listed += gather(self.listed_elsewhere(world, nodes) if lowest else [])
        return self.usable(listed, [item for one in told for item in one["spoiled"]])

    def usable(self, told: Iterable[Iterable[Mapping[str, Any]]], spoiled: Iterable[Sequence[Any]] = ()) -> set[SnapshotRef]:
        """Return all that was listed, each once, less what somebody found spoiled or what is written off."""
        bad = self.spoiled | {(str(node), str(name), int(step), int(lineage)) for node, name, step, lineage in spoiled}
        found = {SnapshotRef(**one) for items in told for one in items}
        return {
            one for one in found if (one.node, one.name, one.step, one.lineage) not in bad and not self.off.covers(one.step, one.lineage)
        }

    def open(self, stored: SnapshotRef) -> Snapshot:
        """Open a snapshot here, brought over from its node if need be; raise `RestoreError` when it cannot be had."""
        try:
            return self._opened(stored)
        except (OSError, shared_memory.UnusableSnapshot) as error:
            self.spoil(stored)
            raise RestoreError(stored, str(error)) from error

    def spoil(self, stored: SnapshotRef) -> None:
        """Never use this one again."""
        self.spoiled.add((stored.node, stored.name, stored.step, stored.lineage))

    def _opened(self, stored: SnapshotRef) -> Snapshot:
        near = stored.node == self.node and self.own is not None
        found = Snapshot(self.own / stored.name) if near and self.own is not None else self._brought(stored)
        if found.label.moment != stored.moment or (found.label.shard, found.label.part) != (stored.shard, stored.part):
            found.close()
            raise shared_memory.UnusableSnapshot(shared_memory.REPLACED)
        return found

    def _brought(self, stored: SnapshotRef) -> Snapshot:
        """Bring a snapshot over from another node, into this node's memory store, or a file of this process's where there is none."""
        if stored.node not in self.servers:
            raise shared_memory.UnusableSnapshot(f"nobody has said where the memory of {stored.node} can be reached")
        folder = self.own if self.own is not None else Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 (made by exclusive creation, no link followed, mode 0600)
        into = folder / f"fetched-{os.getpid()}-{time.monotonic_ns()}{shared_memory.SUFFIX}"
        server = self._server(stored.node, FETCH_SECONDS)
        label = server.labels().get(stored.name)
        if label is None or label.moment != stored.moment:
            raise shared_memory.UnusableSnapshot(shared_memory.REPLACED)
        try:
            server.fetch(stored.name, label, into)
            return Snapshot(into)
        finally:
            into.unlink(missing_ok=True)  # what is open stays until it is closed

    def _server(self, node: str, seconds: float) -> RemoteMemstore:
        """Return the memory store of another *node*, which may be silent for so many *seconds*."""
        return RemoteMemstore(self.servers[node], self._token, seconds, seconds)

    def forget_newer(self, step: int, lineage: int) -> None:
        """Give up what is newer than *step* on this node: training goes on from there, and will come to those steps again."""
        if self.own is None:
            return
        for path, label in shared_memory.labels(self.own).items():
            if label.step > step and label.lineage <= lineage:
                with suppress(OSError):
                    slot = shared_memory.Slot(path)
                    slot.discard()
                    slot.close()


def servers_of(told: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, int]]:
    """Return host and port of each node's memory server, as JSON had them."""
    return {node: (str(host), int(port)) for node, (host, port) in told.items()}


def _listed(node: str, store: MemstoreReader, world: int) -> list[dict[str, Any]]:
    """Return the snapshots of a job of *world* ranks in the memory of *node*, as JSON holds them."""
    return [asdict(SnapshotRef.of(node, name, label)) for name, label in store.labels().items() if label.world == world]


class Restorer:
    """Puts what was fetched into the training of this rank."""

    def __init__(self, training: Training, memory: SnapshotSource) -> None:
        self._training, self._memory = training, memory

    def take(self, fetch: Fetch, give_light: Callable[[bytes], None]) -> int:
        """Go to the state that *fetch* names; return the bytes read. Raise `RestoreError` when a part of it is not as it was written.

        Nothing of the training is changed before all parts are at hand and their indexes agree; a slice whose sum is wrong leaves the
        state half filled, so that the caller must have it filled again, from elsewhere.
        """
        with ExitStack() as opened:
            parts = [(one, opened.enter_context(self._memory.open(one))) for one in fetch.parts]
            rank_state = opened.enter_context(self._memory.open(fetch.rank_state)) if fetch.rank_state is not None else None
            size = self._fill(parts, rank_state) if parts else 0
            if rank_state is not None:
                give_light(rank_state.blobs["rank_state"])
        return size

    def _fill(self, parts: Sequence[tuple[SnapshotRef, Snapshot]], rank_state: Snapshot | None) -> int:
        """Fill the training's tensors: large ones from all parts, what is small from the rank's own snapshot where that is at hand."""
        first = parts[0][1]
        for stored, one in parts:
            if one.entries != first.entries:
                self._memory.spoil(stored)
                raise RestoreError(stored, "its index is not that of the other parts")
        own = StateLayout(self._training).tensors
        device = next((one.device for one in self._training.model.parameters()), torch.device("cpu"))
        found = {entry.key: _place(own.get(entry.key), entry, device) for entry in first.entries}
        flats = [bytes_of(one) for one in found.values()]
        size = sum(self._copy(stored, one, flats) for stored, one in parts)
        small = (rank_state if rank_state is not None else first).blobs
        load_state(self._training, small["static"], small["dynamic"], found, device)
        return size

    def _copy(self, stored: SnapshotRef, one: Snapshot, flats: Sequence[Tensor]) -> int:
        """Copy a part; one that is not as it was written is never used again."""
        try:
            return fill(flats, one)
        except shared_memory.UnusableSnapshot as error:
            self._memory.spoil(stored)
            raise RestoreError(stored, error.why) from error


def _place(present: Tensor | None, entry: shared_memory.Entry, device: torch.device) -> Tensor:
    """Return the training's own tensor where it fits, else a fresh one."""
    if present is not None:
        one = local_of(present)
        alike = tuple(one.shape) == entry.shape and str(one.dtype).removeprefix("torch.") == entry.dtype
        if alike and tuple(one.stride()) == entry.laid_out and fills_its_memory(one):
            return present
    return torch.empty_strided(entry.shape, entry.laid_out, dtype=getattr(torch, entry.dtype), device=device)
