"""What lies in the memory of nodes, by the moment of which it is, and whether a moment is whole: by the planner's own rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.audit.memstores import HANDS, NodeMemory
from holdfast.memstore.shared_memory import Label, Unusable
from holdfast.runtime.snapshots.restore_planner import NoPlan, RankHolding, RestorePlan, Stored, plan

_NO_DISK: Final = ", and there is no whole checkpoint"
Tier = Literal["memory", "replicas"]


@dataclass(frozen=True, slots=True, order=True)
class StoredSnapshot:
    """One snapshot."""

    node: str
    name: str
    label: Label = field(compare=False)

    @property
    def tier(self) -> Tier:
        """Return whether the node's own rank has put it there, or another node as a copy."""
        return "memory" if self.name.startswith("rank-") else "replicas"

    @property
    def stored(self) -> Stored:
        """Return it as the planner knows it."""
        one = self.label
        return Stored(
            step=one.step,
            lineage=one.lineage,
            rank=one.rank,
            piece=one.piece,
            part=one.part,
            parts=one.parts,
            node=self.node,
            name=self.name,
        )


@dataclass(slots=True)
class SnapshotSet:
    """All snapshots of one step and lineage."""

    step: int
    lineage: int
    kept: list[StoredSnapshot]
    plan: RestorePlan | NoPlan
    spoilt: list[str] = field(default_factory=list)
    """Snapshots that are not as they were written; a recovery sees that too, and takes others."""
    broken: list[str] = field(default_factory=list)
    """What else is wrong with it."""
    proven: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Tell whether every rank could go back to it, as far as a recovery can see."""
        return isinstance(self.plan, RestorePlan)

    @property
    def standing(self) -> str:
        """Return ``whole``, ``partial`` or ``damaged``."""
        return "damaged" if self.spoilt or self.broken else "whole" if self.whole else "partial"

    @property
    def lack(self) -> str:
        """Return what nobody has of it."""
        return self.plan.why.removesuffix(_NO_DISK) if isinstance(self.plan, NoPlan) else ""

    @property
    def time(self) -> float:
        """Return when the last of its snapshots was begun."""
        return max(one.label.time for one in self.kept)

    def tiers(self) -> list[tuple[Tier, list[StoredSnapshot]]]:
        """Return the snapshots of each tier that has some."""
        tiers: tuple[Tier, ...] = ("memory", "replicas")
        found: list[tuple[Tier, list[StoredSnapshot]]] = [(tier, [one for one in self.kept if one.tier == tier]) for tier in tiers]
        return [(tier, kept) for tier, kept in found if kept]


def listed(memory: Mapping[str, NodeMemory], away: dict[str, str]) -> list[StoredSnapshot]:
    """Return all snapshots of all nodes; a node that does not answer goes into *away* with the reason."""

    def ask(node: str) -> list[StoredSnapshot]:
        try:
            return [StoredSnapshot(node, name, label) for name, label in memory[node].labels().items()]
        except (OSError, Unusable) as error:
            away[node] = str(error) or type(error).__name__
            return []

    with ThreadPoolExecutor(HANDS, thread_name_prefix="audit") as hands:  # each may take its time
        return sorted(one for kept in hands.map(ask, memory) for one in kept)


def moments(kept: Iterable[StoredSnapshot], world: int) -> list[SnapshotSet]:
    """Return the moments of a job of *world* ranks, newest first."""
    by_moment: dict[tuple[int, int], list[StoredSnapshot]] = defaultdict(list)
    fitting = [one for one in kept if one.label.world == world]
    for one in fitting:
        by_moment[one.label.moment].append(one)
    pieces = {one.label.rank: one.label.piece for one in sorted(fitting, key=lambda one: one.label.moment)}
    return [
        SnapshotSet(step, lineage, held, planned(held, world, pieces)) for (step, lineage), held in sorted(by_moment.items(), reverse=True)
    ]


def planned(kept: Iterable[StoredSnapshot], world: int, pieces: Mapping[int, str] | None = None) -> RestorePlan | NoPlan:
    """Return how *world* new processes would take their state from *kept*, or what is lacking."""
    held = list(kept)
    pieces = pieces or {one.label.rank: one.label.piece for one in sorted(held, key=lambda one: one.label.moment)}
    ranks = [RankHolding(rank=rank, piece=pieces.get(rank, f"of rank {rank}")) for rank in range(world)]
    return plan(ranks, (), [one.stored for one in held])
