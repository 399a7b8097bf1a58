"""Trouble with the state that nodes keep in memory, as their agents tell of it. Training goes on through all of it."""

from __future__ import annotations

from typing import Final

from detectors.catalogue import Blame, Fault, FaultKind, Level, kind
from detectors.evidence import HangLimits, MemoryTrouble, Sample, WorkerExit

_WELL: Final = Sample(evidence=WorkerExit(node="n0", rank=0, at=0.0, code=0, finished=True, step=9))

# Kind, title, level, action.
_KINDS: Final[tuple[tuple[str, str, Level, str], ...]] = (
    (
        "memory-none",
        "A node keeps no state in memory",
        Level.RECORD,
        "give it a memory file system at /dev/shm (in a container: `--shm-size`), or set `checkpoint.memory.every: 0` to do without",
    ),
    (
        "memory-limit",
        "A node has no memory left for the replicas of another one",
        Level.WATCH,
        "raise `checkpoint.memory.limit`, spread the ranks over more nodes, or set `checkpoint.memory.replicas: 0`",
    ),
    (
        "replica-lost",
        "A node's snapshots have no replica on another node",
        Level.WATCH,
        "see the reason; replicas are sent again as soon as the other node can be reached",
    ),
)

for _id, _title, _level, _action in _KINDS:
    kind(
        FaultKind(
            id=_id,
            title=_title,
            component="memory",
            source="agent's report",
            level=_level,
            blame=Blame.STORAGE,
            action=_action,
            reference="docs/architecture.md",
            sick=Sample(evidence=MemoryTrouble(node="n0", at=0.0, kind=_id, why="sample")),
            healthy=_WELL,
            weight=30,
        )
    )


def see_memory(seen: MemoryTrouble, _limits: HangLimits) -> Fault:
    """Name a trouble with memory."""
    return Fault(kind=seen.kind, at=seen.at, node=seen.node, quote=seen.why, signature=seen.kind)
