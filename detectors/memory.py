"""Trouble with the state that nodes keep in memory, as their agents tell of it. Training goes on through all of it."""

from __future__ import annotations

from typing import Final

from detectors.catalogue import Fault, RecommendedAction
from detectors.evidence import HangLimits, MemstoreFailure
from detectors.reported_kinds import Row, enter

_KINDS: Final[tuple[Row, ...]] = (
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

enter(
    _KINDS,
    component="memory",
    source="agent's report",
    reports=lambda name: MemstoreFailure(node="n0", at=0.0, kind=name, why="sample"),
)


def see_memory(seen: MemstoreFailure, _limits: HangLimits) -> Fault:
    """Name a trouble with memory."""
    return Fault(kind=seen.kind, at=seen.at, node=seen.node, quote=seen.why, signature=seen.kind)
