"""List the checkpoints in a job's folder and the snapshots in the memory of its nodes, and whether each step is complete.

For a step in memory the planner of recoveries decides that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from holdfast.checkpoints.memstores import NODES_AT_ONCE
from holdfast.errors import NoCheckpoint, NotReadable
from holdfast.memstore.reader import MemstoreReader
from holdfast.memstore.shared_memory import Label, UnusableSnapshot
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint_verifier.findings import Findings, StoredCheckpoint, inspect_checkpoint
from holdfast.runtime.snapshots.restore_planner import NO_CHECKPOINT, NoPlan, RestorePlan, SnapshotRef, new_holdings, plan, shards_by_rank

Tier = Literal["memory", "replicas"]


def stored_checkpoints(directory: Path, *, verify: bool = False) -> list[StoredCheckpoint]:
    """Return the checkpoints in *directory*, newest first; with *verify* every byte of them is read.

    Raise `NotReadable` when the folder exists and cannot be listed.
    """
    try:
        next(directory.iterdir(), None)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NotReadable("checkpoint directory", str(directory), error.strerror or str(error)) from error
    return [inspect_checkpoint(folder, verify=verify) for folder in manifest.candidates(directory)]


class CheckpointInfo(BaseModel):
    """A complete checkpoint in the format of `torch.distributed.checkpoint`."""

    model_config = ConfigDict(frozen=True)

    job: str
    path: Path
    """The folder, which `torch.distributed.checkpoint` can read."""
    step: int
    """The last committed step in it."""
    world_size: int
    """Ranks that wrote it."""
    bytes: int
    saved_at: float
    """Seconds since 1970."""
    verified: bool
    """Every file was read and has the SHA-256 in the manifest."""
    rejected: tuple[str, ...] = ()
    """Newer checkpoints that were rejected, and why."""


def latest(directory: Path, job: str, *, verify: bool = True) -> CheckpointInfo:
    """Return the newest complete checkpoint in *directory*; with *verify* read every byte of it first.

    Raise `NoCheckpoint` when there is none, `NotReadable` when the folder cannot be read.
    """
    rejected: list[str] = []
    for found in stored_checkpoints(directory):
        one = inspect_checkpoint(found.path, verify=True) if verify and found.complete else found
        if one.complete:
            assert one.manifest is not None, "a complete checkpoint has a manifest"
            return CheckpointInfo(
                job=job,
                path=one.path.absolute(),
                step=one.step,
                world_size=one.manifest.world_size,
                bytes=one.manifest.size,
                saved_at=one.manifest.time,
                verified=verify,
                rejected=tuple(rejected),
            )
        rejected.append(f"step {one.step} is {one.status}: {one.findings.broken[0]}")
    raise NoCheckpoint(job, str(directory), "; ".join(rejected))


@dataclass(frozen=True, slots=True, order=True)
class StoredSnapshot:
    """One snapshot in the memory of a node."""

    node: str
    name: str
    label: Label = field(compare=False)

    @property
    def ref(self) -> SnapshotRef:
        """Return it in the planner's form."""
        return SnapshotRef.of(self.node, self.name, self.label)

    @property
    def tier(self) -> Tier:
        """Return ``replicas`` for a copy from another node, ``memory`` for a snapshot of the node's own rank."""
        return "replicas" if self.ref.is_replica else "memory"


@dataclass(slots=True)
class SnapshotSet:
    """All snapshots of one step and lineage."""

    step: int
    lineage: int
    snapshots: list[StoredSnapshot]
    plan: RestorePlan | NoPlan
    damaged: list[str] = field(default_factory=list)
    """Damaged snapshots; a recovery detects them too, and uses others."""
    findings: Findings = field(default_factory=Findings)
    """Other results of a verification."""

    @property
    def complete(self) -> bool:
        """Whether every rank can resume from it, as far as a recovery can know."""
        return isinstance(self.plan, RestorePlan)

    @property
    def status(self) -> str:
        """Return ``complete``, ``partial`` or ``damaged``."""
        return "damaged" if self.broken else "complete" if self.complete else "partial"

    @property
    def broken(self) -> list[str]:
        """Return what is damaged in it, without what is missing."""
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
        """Return the snapshots of each tier that has any."""
        tiers: tuple[Tier, ...] = ("memory", "replicas")
        found: list[tuple[Tier, list[StoredSnapshot]]] = [(tier, [one for one in self.snapshots if one.tier == tier]) for tier in tiers]
        return [(tier, snapshots) for tier, snapshots in found if snapshots]


def stored_snapshots(stores: Mapping[str, MemstoreReader], unreachable: dict[str, str]) -> list[StoredSnapshot]:
    """Return all snapshots of all nodes; a node that does not answer is added to *unreachable* with the reason."""

    def snapshots_of(node: str) -> list[StoredSnapshot]:
        try:
            return [StoredSnapshot(node, name, label) for name, label in stores[node].labels().items()]
        except (OSError, UnusableSnapshot) as error:
            unreachable[node] = str(error) or type(error).__name__
            return []

    with ThreadPoolExecutor(NODES_AT_ONCE, thread_name_prefix="checkpoints") as pool:
        return sorted(one for found in pool.map(snapshots_of, stores) for one in found)


def snapshot_sets(snapshots: Iterable[StoredSnapshot], world: int) -> list[SnapshotSet]:
    """Return the snapshots of a job of *world* ranks by step and lineage, newest first."""
    by_moment: dict[tuple[int, int], list[StoredSnapshot]] = defaultdict(list)
    fitting = [one for one in snapshots if one.label.world == world]
    for one in fitting:
        by_moment[one.label.moment].append(one)
    shards = shards_by_rank(one.ref for one in fitting)
    return [
        SnapshotSet(step, lineage, stored, restore_plan(stored, world, shards))
        for (step, lineage), stored in sorted(by_moment.items(), reverse=True)
    ]


def restore_plan(snapshots: Iterable[StoredSnapshot], world: int, shards: Mapping[int, str] | None = None) -> RestorePlan | NoPlan:
    """Return how *world* new processes would restore their state from *snapshots*, or what is missing."""
    refs = [one.ref for one in snapshots]
    return plan(new_holdings(shards or shards_by_rank(refs), [""] * world), (), refs)


@dataclass(slots=True)
class Inventory:
    """Everything that a job can resume from."""

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
    """Damaged files in memory whose step is unknown."""

    @property
    def source(self) -> StoredCheckpoint | SnapshotSet | None:
        """Return what a recovery with new processes would use: the newest complete step, from disk unless memory has a newer one."""
        disk = next((one for one in self.disk if one.complete), None)
        memory = next((one for one in self.memory if one.complete), None)
        if memory is not None and (disk is None or memory.step > disk.step):
            return memory
        return disk

    @property
    def sound(self) -> bool:
        """Whether the newest of each tier is complete, and a verification found no damage.

        In memory one of the newest two is enough: ranks seal their parts at different times, so the newest may still be growing.
        """
        disk = not self.disk or self.disk[0].complete
        memory = not self.memory or any(one.complete for one in self.memory[:2])
        damage = self.damaged or any(not one.complete for one in self.disk if self.verified)
        return disk and memory and not damage and not any(one.broken for one in self.memory)
