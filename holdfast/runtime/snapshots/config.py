"""What one rank's snapshots are taken by: what the agent and the job say, whose state it is, and what is wanted on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.runtime.snapshots.copy_schedule import Terms
from holdfast.runtime.snapshots.restore_planner import own_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """What the agent and the job say about snapshots in memory."""

    memstore: Path
    limit: int
    """Bytes for all snapshots of the node; 0: no limit."""
    terms: Terms
    bandwidth: int | None = None
    """Bytes a second that the node may write to disk beside training."""
    has_writer: bool = False
    """The agent has whom to write snapshots to disk."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> SnapshotConfig | None:
        """Return what *environment* says; nothing where there is no memory store, or no snapshots are wanted."""
        place = environment.get("HOLDFAST_MEMSTORE")
        every = int(environment.get("HOLDFAST_MEMORY_EVERY") or 1)
        if not place or every == 0:
            return None
        terms = Terms(
            every=every,
            overhead=float(environment.get("HOLDFAST_MEMORY_OVERHEAD") or 0.01),
            policy=environment.get("HOLDFAST_MEMORY_POLICY") or "skip",
            pause=float(environment.get("HOLDFAST_MEMORY_PAUSE") or 0.1),
        )
        return cls(
            memstore=Path(place),
            limit=int(environment.get("HOLDFAST_MEMSTORE_LIMIT") or 0),
            terms=terms,
            bandwidth=int(environment.get("HOLDFAST_SAVE_BANDWIDTH") or 0) or None,
            has_writer=environment.get("HOLDFAST_CHECKPOINT_WRITER") == "1",
        )


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Which rank's state this is, and how the work on it is shared."""

    rank: int
    world: int
    shard: str
    part: int = 0
    parts: int = 1

    @classmethod
    def of(cls, rank: int, world: int, shards: Mapping[str, str]) -> SnapshotPlace:
        """Return the place of *rank*; *shards* names every rank's piece, by rank: ranks with the same one share the work."""
        shard = shards.get(str(rank))
        if shard is None:
            return cls(rank, world, own_shard(rank))
        copies = sorted(int(other) for other, one in shards.items() if one == shard)
        return cls(rank, world, shard, copies.index(rank), len(copies))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWish:
    """A checkpoint that is wanted: of which step, where, how many whole ones stay."""

    step: int
    directory: Path
    keep: int
    loss: float | None
    stood: float
    """Seconds for which training stood still to agree on it."""
