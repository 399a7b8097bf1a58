"""Faults of checkpoints and in-memory snapshots that workers and agents report. Training continues during all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from holdfast.detectors.catalogue import Attribution, Fault, RecommendedAction, fault_kind
from holdfast.detectors.evidence import CheckpointFailure, Evidence, HangLimits, MemstoreFailure, Sample, WorkerExit

Row = tuple[str, str, RecommendedAction, str]
"""Kind, title, recommended action, advice."""
_HEALTHY: Final = Sample(WorkerExit(node="n0", rank=0, at=0.0, code=0, finished=True, step=9))


def _define(rows: Iterable[Row], *, component: str, source: str, reports: Callable[[str], Evidence]) -> frozenset[str]:
    """Define the fault kinds of *rows*, each with a sample from *reports*; return their ids."""
    known = set()
    for name, title, recommended_action, action in rows:
        fault_kind(
            id=name,
            title=title,
            component=component,
            source=source,
            recommended_action=recommended_action,
            attributed_to=Attribution.STORAGE,
            action=action,
            unhealthy=Sample(reports(name)),
            healthy=_HEALTHY,
            weight=30,
        )
        known.add(name)
    return frozenset(known)


_CHECKPOINT_KINDS: Final[tuple[Row, ...]] = (
    (
        "checkpoint-corrupt",
        "A checkpoint is corrupt",
        RecommendedAction.MONITOR,
        "use the previous one; check the storage: only a checksum finds a flipped bit",
    ),
    (
        "checkpoint-torn",
        "A checkpoint is incomplete",
        RecommendedAction.RECORD,
        "use the previous one; a copy or a removal was interrupted",
    ),
    (
        "checkpoint-disk-full",
        "A checkpoint could not be written: no space left",
        RecommendedAction.MONITOR,
        "free space or lower `checkpoint.keep`; each later save tries again, but after the last one the final state is lost",
    ),
    (
        "checkpoint-read-only",
        "A checkpoint could not be written: the directory is read-only or forbidden",
        RecommendedAction.MONITOR,
        "fix the mount or the permissions; each later save tries again, but after the last one the final state is lost",
    ),
    (
        "checkpoint-write-failed",
        "A checkpoint could not be written",
        RecommendedAction.MONITOR,
        "see the reason; each later save tries again, but after the last one the final state is lost",
    ),
    (
        "checkpoint-backlog",
        "A checkpoint is skipped: the previous one is still being written",
        RecommendedAction.MONITOR,
        "save less often (`checkpoint.interval`), or use faster storage; training does not wait for it",
    ),
    (
        "replica-lag",
        "Snapshots are skipped: replicating one takes longer than the snapshot interval",
        RecommendedAction.MONITOR,
        "give the node an idle core, or raise `checkpoint.memory.bandwidth` or `.interval`; else lost nodes cost more steps",
    ),
    (
        "snapshot-no-memory",
        "A rank has no snapshots in memory: there is no room for them",
        RecommendedAction.MONITOR,
        "raise `checkpoint.memory.max_memory` or free memory; training continues, with a new attempt every 100 steps",
    ),
    (
        "snapshot-spoiled",
        "A snapshot in a node's memory is corrupt, and was not used",
        RecommendedAction.MONITOR,
        "the previous one was used; check the node's memory: only a checksum finds a flipped bit",
    ),
)

_KNOWN: Final = _define(
    _CHECKPOINT_KINDS,
    component="checkpoint",
    source="worker's report",
    reports=lambda name: CheckpointFailure(node="n0", rank=0, at=0.0, kind=name, path="/ckpt/step-00000100", why="sample", step=100),
)

WRITE_FAILED: Final = "checkpoint-write-failed"


def see_checkpoint_failure(seen: CheckpointFailure, _limits: HangLimits) -> Fault:
    """Report a checkpoint failure; an unknown kind counts as a failed write."""
    return Fault(
        kind=seen.kind if seen.kind in _KNOWN else WRITE_FAILED,
        at=seen.at,
        node=seen.node,
        rank=seen.rank,
        step=seen.step,
        quote=f"{seen.path}: {seen.why}",
        signature=f"{seen.kind} {seen.path}",
    )


_MEMSTORE_KINDS: Final[tuple[Row, ...]] = (
    (
        "memory-none",
        "A node keeps no snapshots in memory",
        RecommendedAction.RECORD,
        "give it a memory file system at /dev/shm (in a container: `--shm-size`), or set `checkpoint.memory.interval: 0` to do without",
    ),
    (
        "memory-limit",
        "A node has no memory left for the replicas of another one",
        RecommendedAction.MONITOR,
        "raise `checkpoint.memory.max_memory`, spread the ranks over more nodes, or set `checkpoint.memory.replicas: 0`",
    ),
    (
        "replica-lost",
        "A node's snapshots have no replica on another node",
        RecommendedAction.MONITOR,
        "see the reason; replicas are sent again as soon as the other node can be reached",
    ),
)

_ = _define(
    _MEMSTORE_KINDS,
    component="memory",
    source="agent's report",
    reports=lambda name: MemstoreFailure(node="n0", at=0.0, kind=name, why="sample"),
)


def see_memory(seen: MemstoreFailure, _limits: HangLimits) -> Fault:
    """Name a trouble with memory."""
    return Fault(kind=seen.kind, at=seen.at, node=seen.node, quote=seen.why, signature=seen.kind)
