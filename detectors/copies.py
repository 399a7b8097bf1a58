"""Silent corruption of data: ranks that hold copies of one state, and after the same step have different parameters."""

from __future__ import annotations

from collections import Counter
from typing import Final

from detectors.catalogue import Blame, Fault, RecommendedAction, fault_kind
from detectors.evidence import HangLimits, ReplicaDigests, Sample

MAJORITY: Final = 3
"""Copies that it takes to say which one is wrong."""


def see_copies(seen: ReplicaDigests, _limits: HangLimits) -> list[Fault]:
    """Name the ranks whose parameters differ from those of most copies; where there is no majority, say only that they differ."""
    counts = Counter(seen.digests.values())
    if len(counts) < 2:  # noqa: PLR2004 (all agree)
        return []
    (usual, most), every = counts.most_common(1)[0], len(seen.digests)
    liars = sorted(rank for rank, digest in seen.digests.items() if digest != usual)
    if every < MAJORITY or 2 * most <= every:
        return [_differ(seen, len(counts))]
    return [_liar(seen, rank, usual, most) for rank in liars]


def _differ(seen: ReplicaDigests, kinds: int) -> Fault:
    ranks = ", ".join(map(str, sorted(seen.digests)))
    quote = f"after step {seen.step} the copies of the parameters on ranks {ranks} are of {kinds} kinds{_tensor(seen, *_two(seen))}"
    quote += f"; no majority says which is right{_before(seen)}"
    return Fault(kind=DIFFER.id, at=seen.at, step=seen.step, quote=quote, signature=DIFFER.id)


def _two(seen: ReplicaDigests) -> tuple[int, int]:
    """Return two ranks that differ."""
    first = min(seen.digests)
    return first, min(rank for rank, digest in seen.digests.items() if digest != seen.digests[first])


def _liar(seen: ReplicaDigests, rank: int, usual: str, most: int) -> Fault:
    node, honest = seen.nodes[rank], min(one for one, digest in seen.digests.items() if digest == usual)
    quote = f"after step {seen.step} rank {rank} on {node} has other parameters than its {most} equal copies"
    quote += _tensor(seen, rank, honest) + _before(seen)
    signature = f"{CORRUPT.id} rank {rank}"
    return Fault(kind=CORRUPT.id, at=seen.at, node=node, rank=rank, step=seen.step, quote=quote, signature=signature)


def _tensor(seen: ReplicaDigests, one: int, other: int) -> str:
    """Name the first tensor in which two ranks differ."""
    mine, theirs = seen.sums.get(one, {}), seen.sums.get(other, {})
    wrong = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if not wrong:
        return ""
    return f", first in '{wrong[0]}'" + (f" and in {len(wrong) - 1} more of {len(mine)} tensors" if len(wrong) > 1 else "")


def _before(seen: ReplicaDigests) -> str:
    """Say until when they were equal, and what there is to go back to."""
    if seen.equal_at is None:
        return ""
    return f"; they were equal after step {seen.equal_at}" + (f", {seen.good}" if seen.good else "")


def _sample(*digests: str) -> Sample:
    nodes = {rank: f"n{rank}" for rank in range(len(digests))}
    return Sample(ReplicaDigests(at=0.0, step=128, nodes=nodes, digests=dict(enumerate(digests))))


CORRUPT: Final = fault_kind(
    id="silent-corruption",
    title="The same step gave another result on the same rank, or copies of a state differ",
    component="gpu",
    source="digests of parameters that ranks report",
    recommended_action=RecommendedAction.EVICT,
    blame=Blame.GPU,
    action="take the GPU out; go back to a checkpoint before the difference",
    unhealthy=_sample("a1", "a1", "b2"),
    healthy=_sample("a1", "a1", "a1"),
    weight=85,
    confused_with=("copies-differ", "gradient-nan-one-rank"),
)
DIFFER: Final = fault_kind(
    id="copies-differ",
    title="Copies of a state differ, and no majority says which is right",
    component="job",
    source="digests of parameters that ranks report",
    recommended_action=RecommendedAction.MONITOR,
    blame=Blame.GPU,
    action="stop the job, run it from the checkpoint before the difference with more copies or on other nodes, and compare",
    unhealthy=_sample("a1", "b2"),
    healthy=_sample("a1", "a1"),
    weight=70,
    confused_with=("silent-corruption",),
)
