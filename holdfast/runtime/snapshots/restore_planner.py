"""Plan a restore: from what every rank of a new generation holds, how all of them come to hold one step, or why they cannot.

Pure, standard library only: every rank computes the same plan from the same holdings, so the plan is not sent.

Each rank needs its *shard* of the training (ranks that are copies of each other need the same shard: all ranks under plain data
parallelism, the ranks of one stage in a pipeline, only one rank when everything is sharded) and its own *per-rank state*: random
generators and the position in the data. Both must be of the same step on all ranks. A shard comes from

- *live* state: a survivor is at that step, or is prepared for it (it voted for the step, still has the gradients, and does not
  know the outcome) and it is certain that the step counts;
- *stored* snapshots: files in the memory of nodes, the rank's own node before replicas on others. Copies of a shard share the work, so a
  shard may be stored in parts on several nodes;
- a checkpoint: on disk, complete, readable by every rank, with the per-rank states.

The newest complete step is chosen; at that step the first of these sources that has the shard. States of the same step are combined only
within one *lineage*: the generation that last went back to an earlier step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Self

from holdfast.memstore.shared_memory import Label
from holdfast.memstore.store_folders import is_replica

Moment = tuple[int, int]
"""A step and a lineage."""

MOST_SOURCES: Final = 8
"""Ranks that one rank receives its shard from: these saturate any link, and more only add connections."""
NO_CHECKPOINT: Final = ", and there is no complete checkpoint"
"""The end of the reason when there is no plan."""
_NAMED: Final = 4
"""Ranks that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SnapshotRef:
    """A snapshot in a node's memory, with the per-rank state of the rank that took it."""

    step: int
    lineage: int
    rank: int
    shard: str
    part: int
    """Which of the `parts` of the shard it holds, counted from 0."""
    parts: int
    node: str
    """The node in whose memory it is."""
    name: str
    """The name of its file there."""

    @classmethod
    def of(cls, node: str, name: str, label: Label) -> Self:
        """Return the reference to the snapshot with that *label* in the file *name* in the memory of *node*."""
        facts = {field: getattr(label, field) for field in ("step", "lineage", "rank", "shard", "part", "parts")}
        return cls(node=node, name=name, **facts)

    @property
    def moment(self) -> Moment:
        """Return step and lineage, which must agree among states that are restored together."""
        return self.step, self.lineage

    @property
    def is_replica(self) -> bool:
        """Whether it is a copy from another node."""
        return is_replica(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHolding:
    """What the process of one rank of the new generation needs and holds; a new process holds nothing."""

    rank: int
    shard: str
    """The name of the shard that this rank needs, and that its live state is of."""
    node: str = ""
    """Its node, whose memory is used first."""
    live: int | None = None
    """The last step that it has applied; it also has its per-rank state of that step."""
    prepared: int | None = None
    """The step after `live`, if it voted for that and does not know the outcome; it has its per-rank states of both."""
    lineage: int = 0
    """The lineage of its live state; the same on all survivors."""
    rank_states: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By rank: the steps of which it keeps the per-rank state of another rank."""

    def __post_init__(self) -> None:
        if self.prepared is not None and (self.live is None or self.prepared != self.live + 1):
            raise ValueError(f"rank {self.rank} cannot be prepared for step {self.prepared} with step {self.live} as its last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One share of a shard, to be sent from one rank to another."""

    shard: str
    source: int
    target: int
    share: int
    """Counted from 0."""
    shares: int
    """Into how many the shard is divided for this target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What one rank reads from the memory of nodes."""

    target: int
    parts: tuple[SnapshotRef, ...]
    """All parts of its shard, in their order; none when a survivor sends the shard."""
    rank_state: SnapshotRef | None
    """The snapshot with its per-rank state; None when another rank sends that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """How all ranks come to hold `step`."""

    step: int
    reason: str
    """Why this step, as text for people."""
    lineage: int = 0
    """The lineage of the state that all resume from; meaningless with a checkpoint."""
    roll_forward: frozenset[int] = frozenset()
    """Ranks that apply the step they are prepared for. They do so first: some of them may be sources."""
    roll_back: frozenset[int] = frozenset()
    """Survivors that give up something newer: a step that they are prepared for, or steps that they have applied."""
    fetches: tuple[Fetch, ...] = ()
    """Reads from the memory of nodes, by target."""
    transfers: tuple[Transfer, ...] = ()
    """Transfers between ranks, by target and share; a rank that is no target holds its shard itself."""
    rank_states: tuple[tuple[int, int], ...] = ()
    """(source, target) of each per-rank state that is sent from rank to rank, by target."""
    checkpoint: bool = False
    """Every rank reads the checkpoint of the step, shards and per-rank states; nothing is sent between ranks."""

    @property
    def from_memory(self) -> bool:
        """Whether any shard is read from the memory of nodes."""
        return any(fetch.parts for fetch in self.fetches)

    def takes_replica(self, rank: int) -> bool:
        """Return whether *rank* reads any part of its shard from a replica."""
        return any(part.is_replica for fetch in self.fetches if fetch.target == rank for part in fetch.parts)


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No step is complete."""

    why: str
    """What is missing, as text for people."""


def plan(
    holdings: Iterable[RankHolding], checkpoints: Iterable[int] = (), stored: Iterable[SnapshotRef] = (), *, most: int = MOST_SOURCES
) -> RestorePlan | NoPlan:
    """Return how all ranks come to hold the newest step that is complete.

    Args:
        holdings: one for every rank of the generation, in any order.
        checkpoints: steps whose checkpoints are complete; the same for every rank.
        stored: snapshots in the memory of reachable nodes; the same for every rank.
        most: maximum number of ranks that one rank receives its shard from.
    """
    if most < 1:
        raise ValueError(f"most={most}: a shard comes from at least one rank")
    ranks, snapshots, on_disk = sorted(holdings, key=lambda one: one.rank), sorted(stored), frozenset(checkpoints)
    if len({one.rank for one in ranks}) != len(ranks):
        raise ValueError("a rank has two holdings")
    survivors = [one for one in ranks if one.live is not None]
    lineage = max((one.lineage for one in survivors), default=0)
    certain = _certain_steps(survivors)
    lacking: dict[int, str] = {}
    live_moments: set[Moment] = set()
    if certain is None:
        where = _listed([f"rank {one.rank} at {one.live}" for one in survivors])
        lacking[_last_applied(survivors)] = f"the surviving ranks are at steps that do not match: {where}"
    else:
        live_moments = {(step, lineage) for step in {one.live for one in survivors if one.live is not None} | certain}
    moments = live_moments | {one.moment for one in snapshots} | {(step, -1) for step in on_disk}
    for moment in sorted(moments, reverse=True):
        step = moment[0]
        holders = _Holders(ranks, moment, certain if moment[1] == lineage else None, snapshots)
        lack = holders.lack()
        if not lack:
            return holders.plan(_reason(holders.where(), lacking), most)
        if moment[1] == -1:  # a step that is also in memory comes here last
            reason = _reason(f"the checkpoint of step {step} is complete", lacking or {step: lack})
            return RestorePlan(step=step, reason=reason, roll_back=_newer(ranks, step), checkpoint=True)
        lacking.setdefault(step, lack)
    what = lacking[max(lacking)] if lacking else "no rank holds any state"
    return NoPlan(what + NO_CHECKPOINT)


def own_shard(rank: int) -> str:
    """Return the name of the shard of a *rank* of which no other rank is a copy."""
    return f"of rank {rank}"


def shards_by_rank(stored: Iterable[SnapshotRef]) -> dict[int, str]:
    """Return the shard of each rank, from its newest snapshot."""
    return {one.rank: one.shard for one in sorted(stored, key=lambda one: one.moment)}


def new_holdings(shards: Mapping[int, str], nodes: Sequence[str]) -> list[RankHolding]:
    """Return the holdings when all ranks are new processes: *shards* by rank, as far as known, and the node of each rank."""
    return [RankHolding(rank=rank, shard=shards.get(rank, own_shard(rank)), node=node) for rank, node in enumerate(nodes)]


def _certain_steps(survivors: Sequence[RankHolding]) -> frozenset[int] | None:
    """Return the steps that live state may be at or go forward to; None when no vote explains the steps of the survivors.

    A rank that is prepared for step k may apply it when any survivor has: then everybody had voted for it. When no survivor
    has, but all of them are prepared, they may too: each has its complete gradients, and they all do the same. Otherwise
    some rank has no gradients of step k, and those that are prepared give theirs up.
    """
    if not survivors:
        return frozenset()
    applied = _last_applied(survivors)
    if any(applied not in {one.live, one.prepared} for one in survivors):
        return None
    if all(one.prepared == applied + 1 for one in survivors):
        return frozenset({applied, applied + 1})
    return frozenset({applied})


def _last_applied(survivors: Sequence[RankHolding]) -> int:
    return max(one.live for one in survivors if one.live is not None)


def _newer(ranks: Sequence[RankHolding], step: int) -> frozenset[int]:
    """Return the survivors that hold or are prepared for something newer than *step*."""
    return frozenset(one.rank for one in ranks if max(one.live or 0, one.prepared or 0) > step)


class _Holders:
    """Who holds what of one step and lineage."""

    def __init__(
        self, ranks: Sequence[RankHolding], moment: Moment, certain: frozenset[int] | None, snapshots: Sequence[SnapshotRef]
    ) -> None:
        """*certain*: steps that live state may go forward to; None when live state is not of this lineage, or cannot be used."""
        self.ranks, (self.step, self.lineage) = ranks, moment
        self.shards: dict[str, list[int]] = defaultdict(list)
        self.rank_states: dict[int, list[int]] = defaultdict(list)
        self.live: set[int] = set()
        self.forward: set[int] = set()
        for one in ranks if certain is not None else ():
            if one.prepared == self.step and self.step in (certain or ()):
                self.forward.add(one.rank)
            if one.live == self.step or one.rank in self.forward:
                self.live.add(one.rank)
                self.shards[one.shard].append(one.rank)
            for rank, steps in one.rank_states.items():
                if self.step in steps and rank != one.rank:
                    self.rank_states[rank].append(one.rank)
        self.snapshots = [one for one in snapshots if one.moment == moment]
        self.divisions: dict[str, dict[int, dict[int, list[SnapshotRef]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        """Snapshots by shard, number of parts, and part."""
        for snapshot in self.snapshots:
            self.divisions[snapshot.shard][snapshot.parts][snapshot.part].append(snapshot)

    def lack(self) -> str:
        """Return what of the step no rank and no node holds; empty if it is complete."""
        without: dict[str, list[int]] = defaultdict(list)
        for one in self.ranks:
            if one.shard not in self.shards and not self._parts(one):
                without[one.shard].append(one.rank)
        missing = [f"the state of {_named(ranks)}" for _, ranks in sorted(without.items(), key=lambda item: item[1])]
        no_rank_state = [
            one.rank
            for one in self.ranks
            if one.rank not in self.live and not self.rank_states.get(one.rank) and not self._stored_rank_state(one)
        ]
        if no_rank_state:
            missing.append(f"the generators and the position in the data of {_named(no_rank_state)}")
        return f"nobody has {' or '.join(missing)} at step {self.step}" if missing else ""

    def where(self) -> str:
        """Return where the complete step is, as text for people."""
        if not self._fetches():
            return f"the surviving ranks have all of step {self.step}"
        return f"the memory of nodes {'and the surviving ranks have' if self.live else 'has'} all of step {self.step}"

    def _parts(self, one: RankHolding) -> tuple[SnapshotRef, ...]:
        """Return the parts of the shard of *one*, the nearest of each; none unless all are there."""
        for parts, by_part in sorted(self.divisions.get(one.shard, {}).items()):
            if len(by_part) == parts:
                return tuple(self._nearest(one, by_part[part]) for part in sorted(by_part))
        return ()

    def _stored_rank_state(self, one: RankHolding) -> SnapshotRef | None:
        """Return the nearest snapshot with the per-rank state of *one*."""
        found = [snapshot for snapshot in self.snapshots if snapshot.rank == one.rank]
        return self._nearest(one, found) if found else None

    def _nearest(self, one: RankHolding, found: Sequence[SnapshotRef]) -> SnapshotRef:
        """Return the one on the node of *one*, or one of the others, a different one for each rank."""
        near = [snapshot for snapshot in found if snapshot.node == one.node]
        return near[0] if near else found[one.rank % len(found)]

    def plan(self, reason: str, most: int) -> RestorePlan:
        """Return the plan for the step, which is complete."""
        return RestorePlan(
            step=self.step,
            reason=reason,
            lineage=self.lineage,
            roll_forward=frozenset(self.forward),
            roll_back=_newer(self.ranks, self.step),
            fetches=self._fetches(),
            transfers=self._transfers(most),
            rank_states=tuple(
                (min(self.rank_states[one.rank]), one.rank)
                for one in self.ranks
                if one.rank not in self.live and self.rank_states.get(one.rank)
            ),
        )

    def _transfers(self, most: int) -> tuple[Transfer, ...]:
        """Return the transfers, the load spread evenly over the ranks that have the shard.

        Of ranks with the same load those that follow the target in the ring of ranks are used first.
        """
        load: dict[int, Fraction] = defaultdict(Fraction)
        found = []
        for one in self.ranks:
            if one.rank in self.live or one.shard not in self.shards:
                continue
            ring = sorted(self.shards[one.shard], key=lambda rank: (rank < one.rank, rank))
            sources = sorted(sorted(ring, key=lambda rank: load.get(rank, Fraction()))[:most])
            for share, source in enumerate(sources):
                load[source] += Fraction(1, len(sources))
                found.append(Transfer(shard=one.shard, source=source, target=one.rank, share=share, shares=len(sources)))
        return tuple(found)

    def _fetches(self) -> tuple[Fetch, ...]:
        """Return what no surviving rank can send."""
        found = []
        for one in self.ranks:
            if one.rank in self.live:
                continue
            parts = () if one.shard in self.shards else self._parts(one)
            rank_state = None if self.rank_states.get(one.rank) else self._stored_rank_state(one)
            if parts or rank_state:
                found.append(Fetch(target=one.rank, parts=parts, rank_state=rank_state))
        return tuple(found)


def _reason(where: str, lacking: Mapping[int, str]) -> str:
    """Return why this step, and why not the newest of those that are *lacking* something."""
    return f"{where}; {lacking[max(lacking)]}" if lacking else where


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed([str(rank) for rank in ranks])}"


def _listed(names: Sequence[str]) -> str:
    """Return *names* as a sentence lists them, the first few by name."""
    if len(names) > _NAMED:
        names = [*names[: _NAMED - 1], f"{len(names) - _NAMED + 1} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
