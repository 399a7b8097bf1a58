"""Faults of checkpoints and of in-memory snapshots, as workers and agents report them. Training continues through all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from detectors.catalogue import Blame, Fault, RecommendedAction, fault_kind
from detectors.evidence import CheckpointFailure, Evidence, HangLimits, MemstoreFailure, Sample, WorkerExit

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
            blame=Blame.STORAGE,
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
        "A checkpoint's bytes are not those that were written",
        RecommendedAction.MONITOR,
        "take the one before; check the storage: a flipped bit is found by checksum only",
    ),
    (
        "checkpoint-torn",
        "A checkpoint is incomplete",
        RecommendedAction.RECORD,
        "take the one before; something ended in the middle of a copy or a removal",
    ),
    (
        "checkpoint-disk-full",
        "A checkpoint could not be written: no space left",
        RecommendedAction.MONITOR,
        "free space or lower `checkpoint.keep`; training goes on and the next save tries again",
    ),
    (
        "checkpoint-read-only",
        "A checkpoint could not be written: the place is read-only or forbidden",
        RecommendedAction.MONITOR,
        "mend the mount or the permissions; training goes on and the next save tries again",
    ),
    (
        "checkpoint-write-failed",
        "A checkpoint could not be written",
        RecommendedAction.MONITOR,
        "see the reason; training goes on and the next save tries again",
    ),
    (
        "checkpoint-late",
        "A checkpoint is left out: the one before is still being written",
        RecommendedAction.MONITOR,
        "make checkpoints rarer (`checkpoint.every`), or the storage faster; training does not wait for it",
    ),
    (
        "replica-behind",
        "Snapshots are left out: replicas do not reach the other node as fast as snapshots are taken",
        RecommendedAction.MONITOR,
        "give the node an idle core, or raise `checkpoint.memory.bandwidth` or `checkpoint.memory.every`; a lost node costs more steps",
    ),
    (
        "snapshot-no-memory",
        "A rank has no snapshots in memory: there is no room for them",
        RecommendedAction.MONITOR,
        "raise `checkpoint.memory.limit` or free memory; training goes on, and it is tried again every 100 steps",
    ),
    (
        "snapshot-spoiled",
        "A snapshot in a node's memory was not as it was written, and was not used",
        RecommendedAction.MONITOR,
        "the one before was used; look at the node's memory: a flipped bit is found by checksum only",
    ),
)

_KNOWN: Final = _define(
    _CHECKPOINT_KINDS,
    component="checkpoint",
    source="worker's report",
    reports=lambda name: CheckpointFailure(node="n0", rank=0, at=0.0, kind=name, path="/ckpt/step-00000100", why="sample", step=100),
)

UNKNOWN_TROUBLE: Final = "checkpoint-write-failed"


def see_trouble(seen: CheckpointFailure, _limits: HangLimits) -> Fault:
    """Name a checkpoint's trouble; a word we do not know is a failed write, never nothing."""
    return Fault(
        kind=seen.kind if seen.kind in _KNOWN else UNKNOWN_TROUBLE,
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
        "A node keeps no state in memory",
        RecommendedAction.RECORD,
        "give it a memory file system at /dev/shm (in a container: `--shm-size`), or set `checkpoint.memory.every: 0` to do without",
    ),
    (
        "memory-limit",
        "A node has no memory left for the replicas of another one",
        RecommendedAction.MONITOR,
        "raise `checkpoint.memory.limit`, spread the ranks over more nodes, or set `checkpoint.memory.replicas: 0`",
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
