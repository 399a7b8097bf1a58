"""Which checkpoints lie in a job's folder and which snapshots in the memory of its nodes, and whether each step is whole.

Of a step in memory the recovery's own planner decides that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.checkpoints.memstores import NODES_AT_ONCE
from holdfast.errors import NotReadable
from holdfast.memstore.reader import MemstoreReader
from holdfast.memstore.shared_memory import Label, UnusableSnapshot
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint_verifier.files import StoredCheckpoint, inspect_checkpoint
from holdfast.runtime.checkpoint_verifier.findings import Findings
from holdfast.runtime.snapshots.restore_planner import NO_CHECKPOINT, NoPlan, RestorePlan, SnapshotRef, new_holdings, plan, shards_by_rank

Tier = Literal["memory", "replicas"]


def stored_checkpoints(directory: Path, *, verify: bool = False) -> list[StoredCheckpoint]:
    """Return the checkpoints in *directory*, newest first; with *verify* every byte of them is read.

    Raise `NotReadable` when the folder is there and cannot be looked into.
    """
    try:
        next(directory.iterdir(), None)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NotReadable("checkpoint directory", str(directory), error.strerror or str(error)) from error
    return [inspect_checkpoint(folder, verify=verify) for folder in manifest.candidates(directory)]


@dataclass(frozen=True, slots=True, order=True)
class StoredSnapshot:
    """One snapshot in the memory of a node."""

    node: str
    name: str
    label: Label = field(compare=False)

    @property
    def stored(self) -> SnapshotRef:
        """Return it as the planner knows it."""
        return SnapshotRef.of(self.node, self.name, self.label)

    @property
    def tier(self) -> Tier:
        """Return whether the node's own rank has put it there, or another node as a copy."""
        return "replicas" if self.stored.is_replica else "memory"


@dataclass(slots=True)
class SnapshotSet:
    """All snapshots of one step and lineage."""

    step: int
    lineage: int
    snapshots: list[StoredSnapshot]
    plan: RestorePlan | NoPlan
    damaged: list[str] = field(default_factory=list)
    """Snapshots that are not as they were written; a recovery sees that too, and takes others."""
    findings: Findings = field(default_factory=Findings)
    """What else was found by who read them."""

    @property
    def complete(self) -> bool:
        """Tell whether every rank could go back to it, as far as a recovery can see."""
        return isinstance(self.plan, RestorePlan)

    @property
    def status(self) -> str:
        """Return ``complete``, ``partial`` or ``damaged``."""
        return "damaged" if self.broken else "complete" if self.complete else "partial"

    @property
    def broken(self) -> list[str]:
        """Return all that is wrong with it, but for what is missing."""
        return [*self.damaged, *self.findings.broken]

    @property
    def missing(self) -> str:
        """Return what no node has of it."""
        return self.plan.why.removesuffix(NO_CHECKPOINT) if isinstance(self.plan, NoPlan) else ""

    @property
    def time(self) -> float:
        """Return when the last of its snapshots was begun."""
        return max(one.label.time for one in self.snapshots)

    def tiers(self) -> list[tuple[Tier, list[StoredSnapshot]]]:
        """Return the snapshots of each tier that has some."""
        tiers: tuple[Tier, ...] = ("memory", "replicas")
        found: list[tuple[Tier, list[StoredSnapshot]]] = [(tier, [one for one in self.snapshots if one.tier == tier]) for tier in tiers]
        return [(tier, snapshots) for tier, snapshots in found if snapshots]


def stored_snapshots(stores: Mapping[str, MemstoreReader], unreachable: dict[str, str]) -> list[StoredSnapshot]:
    """Return all snapshots of all nodes; a node that does not answer goes into *unreachable* with the reason."""

    def ask(node: str) -> list[StoredSnapshot]:
        try:
            return [StoredSnapshot(node, name, label) for name, label in stores[node].labels().items()]
        except (OSError, UnusableSnapshot) as error:
            unreachable[node] = str(error) or type(error).__name__
            return []

    with ThreadPoolExecutor(NODES_AT_ONCE, thread_name_prefix="checkpoints") as pool:  # each may take its time
        return sorted(one for found in pool.map(ask, stores) for one in found)


def snapshot_sets(snapshots: Iterable[StoredSnapshot], world: int) -> list[SnapshotSet]:
    """Return the snapshots of a job of *world* ranks by step and lineage, newest first."""
    by_moment: dict[tuple[int, int], list[StoredSnapshot]] = defaultdict(list)
    fitting = [one for one in snapshots if one.label.world == world]
    for one in fitting:
        by_moment[one.label.moment].append(one)
    shards = shards_by_rank(one.stored for one in fitting)
    return [
        SnapshotSet(step, lineage, held, restore_plan(held, world, shards))
        for (step, lineage), held in sorted(by_moment.items(), reverse=True)
    ]


def restore_plan(snapshots: Iterable[StoredSnapshot], world: int, shards: Mapping[int, str] | None = None) -> RestorePlan | NoPlan:
    """Return how *world* new processes would take their state from *snapshots*, or what is missing."""
    stored = [one.stored for one in snapshots]
    return plan(new_holdings(shards or shards_by_rank(stored), [""] * world), (), stored)


@dataclass(slots=True)
class Inventory:
    """All that a job could go back to."""

    directory: Path
    """The folder of its checkpoints."""
    world: int
    disk: list[StoredCheckpoint]
    verified: bool
    """Every byte was read."""
    memory: list[SnapshotSet] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    """Nodes whose memory could not be reached, and why."""
    damaged: list[str] = field(default_factory=list)
    """Files in memory of which nobody knows any more of which step they were."""

    @property
    def source(self) -> StoredCheckpoint | SnapshotSet | None:
        """Return what a recovery would take in which every process is new: the newest whole step, of the disk if memory has no newer."""
        disk = next((one for one in self.disk if one.complete), None)
        memory = next((one for one in self.memory if one.complete), None)
        if memory is not None and (disk is None or memory.step > disk.step):
            return memory
        return disk

    @property
    def sound(self) -> bool:
        """Tell whether the newest of each tier is whole, and nothing damaged was found by who looked at every byte.

        In memory the newest but one counts too: ranks seal their parts one after the other, so the newest may still be growing.
        """
        disk = not self.disk or self.disk[0].complete
        memory = not self.memory or any(one.complete for one in self.memory[:2])
        damage = self.damaged or any(not one.complete for one in self.disk if self.verified)
        return disk and memory and not damage and not any(one.broken for one in self.memory)
