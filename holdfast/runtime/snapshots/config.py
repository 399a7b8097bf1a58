"""Settings, write requests and counters of one rank's snapshots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.runtime.snapshots.copy_schedule import SnapshotLimits
from holdfast.runtime.snapshots.restore_planner import own_shard
from holdfast.runtime.telemetry.wait_windows import WaitWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """The settings that the agent and the job give through the environment."""

    memstore: Path
    max_bytes: int
    """Maximum bytes of all snapshots of the node; 0: no limit."""
    limits: SnapshotLimits
    bandwidth: int | None = None
    """Maximum bytes per second that the node writes to disk alongside training."""
    has_writer: bool = False
    """The agent has a checkpoint writer."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> SnapshotConfig | None:
        """Return the settings in *environment*; None where there is no memory store, or snapshots are off."""
        place = environment.get("HOLDFAST_MEMSTORE")
        every = int(environment.get("HOLDFAST_MEMORY_EVERY") or 1)
        if not place or every == 0:
            return None
        limits = SnapshotLimits(
            every=every,
            overhead=float(environment.get("HOLDFAST_MEMORY_OVERHEAD") or 0.01),
            policy=environment.get("HOLDFAST_MEMORY_POLICY") or "skip",
            pause=float(environment.get("HOLDFAST_MEMORY_PAUSE") or 0.1),
        )
        return cls(
            memstore=Path(place),
            max_bytes=int(environment.get("HOLDFAST_MEMSTORE_LIMIT") or 0),
            limits=limits,
            bandwidth=int(environment.get("HOLDFAST_SAVE_BANDWIDTH") or 0) or None,
            has_writer=environment.get("HOLDFAST_CHECKPOINT_WRITER") == "1",
        )


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Which rank's state is copied, and which part of it: ranks that are copies of each other share the work."""

    rank: int
    world: int
    shard: str
    part: int = 0
    parts: int = 1

    @classmethod
    def of(cls, rank: int, world: int, shards: Mapping[str, str]) -> SnapshotPlace:
        """Return the place of *rank*; *shards* names every rank's shard, by rank: ranks with the same one share the work."""
        shard = shards.get(str(rank))
        if shard is None:
            return cls(rank, world, own_shard(rank))
        copies = sorted(int(other) for other, one in shards.items() if one == shard)
        return cls(rank, world, shard, copies.index(rank), len(copies))


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWrite:
    """A checkpoint that is to be written from a snapshot: of which step, where, and how many complete ones to keep."""

    step: int
    directory: Path
    keep: int
    loss: float | None
    paused: float
    """Seconds for which training paused to agree on it."""


@dataclass(slots=True)
class SnapshotCounts:
    """What snapshots have cost so far."""

    steps: int = 0
    taken: int = 0
    given_up: int = 0
    skipped: int = 0
    """Not taken because replicas were behind."""
    copied: float = 0.0
    """Seconds of copying."""
    overlapped: float = 0.0
    """Seconds of copying while training waited."""
    paused: float = 0.0
    """Seconds for which training paused."""
    prepared: float = 0.0
    """Seconds of the training thread to begin them."""
    slowed: float = 0.0
    """Seconds by which snapshots made steps longer, compared with steps without one; at least `prepared` and `paused`."""
    trained: float = 0.0
    """Seconds of all steps."""
    size: int = 0
    """Bytes of the newest."""
    newest: int | None = None
    """The step of the newest complete one."""
    newest_at: float | None = None
    """When it was begun, and so its state was current (wall clock)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What happened in a step: its begin (wall clock) and length, and its events in seconds since its begin."""

    began: float
    took: float
    windows: list[WaitWindow]
    operations: list[tuple[str, int]]
    """Point-to-point operations in their order, with the peer's rank."""
    copies: list[tuple[float, float, bool]]
    """Copying: begin, end, and whether training waited."""
