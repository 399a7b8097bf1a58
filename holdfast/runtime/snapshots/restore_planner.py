"""From what every rank of a new generation holds to a plan by which all of them hold one step, or the reason why there is none.

Pure, and on the standard library alone: every rank computes the plan for itself from the same holdings and arrives at the
same one, so nobody has to tell it to the others.

Each rank needs its *shard* of the training (ranks that are copies of each other need the same piece: all ranks under plain
data parallelism, the ranks of one stage in a pipeline, nobody else when everything is sharded) and its own *rank_state* state:
random generators, and the position in the data. Both must be of the same step on all ranks. A piece comes from

- *live* state: a survivor is at that step, or is prepared for it (it voted for the step, still has the gradients, and does not
  know whether the step counts) and it is certain that the step counts;
- *stored* snapshots: files in the memory of nodes, the node's own before replicas on others. Copies of a piece share the work, so a
  piece may lie in parts on several nodes;
- a checkpoint: on disk, whole, for everybody to read, light states and all.

The newest step that is whole wins; at that step the first of these sources that has the piece. State of the same step goes together only
when it is of the same *lineage*: the generation that last went back to an earlier step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Self

from holdfast.memstore.file_names import is_replica
from holdfast.memstore.shared_memory import Label

Moment = tuple[int, int]
"""A step and a lineage."""

MOST_SOURCES: Final = 8
"""Ranks that one rank takes its piece from: so many fill any link, and more are only more connections to make."""
NO_CHECKPOINT: Final = ", and there is no whole checkpoint"
"""How the reason ends for which there is no plan."""
_NAMED: Final = 4
"""Ranks that a sentence lists."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SnapshotRef:
    """A snapshot in a node's memory, with the light state of the rank that took it."""

    step: int
    lineage: int
    rank: int
    shard: str
    part: int
    """Which share of the piece it holds, counted from 0, out of `parts`."""
    parts: int
    node: str
    """The node in whose memory it lies."""
    name: str
    """Its name there."""

    @classmethod
    def of(cls, node: str, name: str, label: Label) -> Self:
        """Return the snapshot with that *label* in the file *name* in the memory of *node*."""
        facts = {field: getattr(label, field) for field in ("step", "lineage", "rank", "shard", "part", "parts")}
        return cls(node=node, name=name, **facts)

    @property
    def moment(self) -> Moment:
        """Return what must agree among states that are used together."""
        return self.step, self.lineage

    @property
    def is_replica(self) -> bool:
        """Tell whether it is a copy that another node sent to its home."""
        return is_replica(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHolding:
    """What the process of one rank of the new generation needs, and what it holds; a new process holds nothing."""

    rank: int
    shard: str
    """The name of the piece that this rank needs, and that its live state is of."""
    node: str = ""
    """Where it runs: what lies in the memory of that node is taken first."""
    live: int | None = None
    """The last step that it has applied; with it goes its own light state of that step."""
    prepared: int | None = None
    """The step after `live`, if it voted for that and does not know the outcome; it holds its light states of both."""
    lineage: int = 0
    """The lineage of its live state; survivors have the same."""
    rank_states: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Steps of which it keeps light states for other ranks, by rank."""

    def __post_init__(self) -> None:
        if self.prepared is not None and (self.live is None or self.prepared != self.live + 1):
            raise ValueError(f"rank {self.rank} cannot be prepared for step {self.prepared} with step {self.live} as its last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One share of a piece, on its way from one rank to another."""

    shard: str
    source: int
    target: int
    share: int
    """Counted from 0."""
    shares: int
    """Into how many the piece is cut for this target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What one rank takes from the memory of nodes."""

    target: int
    parts: tuple[SnapshotRef, ...]
    """All parts of its piece, in their order; none when the piece itself comes from a rank that lives."""
    rank_state: SnapshotRef | None
    """The snapshot that has its light state; None when another rank sends that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """How all ranks come to hold `step`."""

    step: int
    reason: str
    """Why this step, in plain words."""
    lineage: int = 0
    """The lineage of the state that all go on from; meaningless with a checkpoint."""
    roll_forward: frozenset[int] = frozenset()
    """Ranks that apply the step they are prepared for. They do so first: some of them may be sources."""
    roll_back: frozenset[int] = frozenset()
    """Survivors that give up something newer: a step that they are prepared for, or steps that they have applied."""
    fetches: tuple[Fetch, ...] = ()
    """What is taken from the memory of nodes, by target."""
    transfers: tuple[Transfer, ...] = ()
    """What goes from rank to rank, by target and share; a rank that is no target holds its piece itself."""
    rank_states: tuple[tuple[int, int], ...] = ()
    """(source, target) of each light state that goes from rank to rank, by target."""
    checkpoint: bool = False
    """Everybody reads the checkpoint of the step, pieces and light states; nothing goes from rank to rank."""

    @property
    def from_memory(self) -> bool:
        """Whether any piece is taken from the memory of nodes."""
        return any(fetch.parts for fetch in self.fetches)

    def takes_replica(self, rank: int) -> bool:
        """Tell whether *rank* takes any of its piece from a replica: a copy that another node kept."""
        return any(part.is_replica for fetch in self.fetches if fetch.target == rank for part in fetch.parts)


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No step is whole."""

    why: str
    """What is lacking, in plain words."""


def plan(
    holdings: Iterable[RankHolding], checkpoints: Iterable[int] = (), stored: Iterable[SnapshotRef] = (), *, most: int = MOST_SOURCES
) -> RestorePlan | NoPlan:
    """Return how all ranks come to hold the newest step that can be had whole.

    Args:
        holdings: one for every rank of the generation, in any order.
        checkpoints: steps whose checkpoints are whole; everybody must be given the same.
        stored: snapshots in the memory of nodes that can be reached; everybody must be given the same.
        most: ranks that one rank takes its piece from at most.
    """
    if most < 1:
        raise ValueError(f"most={most}: a piece comes from one rank at least")
    ranks, kept = _in_order(holdings), sorted(stored)
    on_disk = frozenset(checkpoints)
    certain = _certain(ranks)
    lacking = _apart(ranks) if certain is None else {}
    for step, lineage in sorted(_moments(ranks, certain, kept) | {(step, -1) for step in on_disk}, reverse=True):
        scene = _Scene(ranks, (step, lineage), certain, kept)
        lack = scene.lack()
        if not lack:
            return scene.plan(_reason(scene.whole(), lacking), most)
        if lineage == -1:  # of a step that memory has whole too, this one comes last
            reason = _reason(f"the checkpoint of step {step} is whole", lacking or {step: lack})
            return RestorePlan(step=step, reason=reason, roll_back=_newer(ranks, step), checkpoint=True)
        lacking.setdefault(step, lack)
    what = lacking[max(lacking)] if lacking else "no rank holds any state"
    return NoPlan(what + NO_CHECKPOINT)


def own_shard(rank: int) -> str:
    """Return the name of the piece of a *rank* of which no other rank is a copy."""
    return f"of rank {rank}"


def shards_by_rank(stored: Iterable[SnapshotRef]) -> dict[int, str]:
    """Return the piece of each rank, as its newest snapshot names it."""
    return {one.rank: one.shard for one in sorted(stored, key=lambda one: one.moment)}


def new_holdings(shards: Mapping[int, str], nodes: Sequence[str]) -> list[RankHolding]:
    """Return what the ranks need when all of them are new processes: *shards* by rank, as far as known, and the node of each rank."""
    return [RankHolding(rank=rank, shard=shards.get(rank, own_shard(rank)), node=node) for rank, node in enumerate(nodes)]


def _in_order(holdings: Iterable[RankHolding]) -> Sequence[RankHolding]:
    """Return *holdings* by rank, each once."""
    ranks = sorted(holdings, key=lambda one: one.rank)
    if len({one.rank for one in ranks}) != len(ranks):
        raise ValueError("a rank has two holdings")
    return ranks


def _moments(ranks: Sequence[RankHolding], certain: frozenset[int] | None, stored: Sequence[SnapshotRef]) -> set[Moment]:
    """Return every step, by lineage, that somebody holds a piece of and that may count."""
    live: set[Moment] = set()
    if certain is not None:
        lineage = _lineage(ranks)
        live = {(step, lineage) for step in {one.live for one in ranks if one.live is not None} | certain}
    return live | {one.moment for one in stored}


def _lineage(ranks: Sequence[RankHolding]) -> int:
    """Return the lineage of the survivors."""
    return max((one.lineage for one in ranks if one.live is not None), default=0)


def _certain(ranks: Sequence[RankHolding]) -> frozenset[int] | None:
    """Return the steps that live state may go forward to; None when the survivors are at steps that no vote explains.

    A rank that is prepared for step k may apply it when any survivor has: then everybody had voted for it. When no survivor
    has, but all of them are prepared, they may too: each has its gradients whole, and they all do the same. Otherwise
    somebody has no gradients of step k, and those who are prepared give theirs up.
    """
    survivors = [one for one in ranks if one.live is not None]
    if not survivors:
        return frozenset()
    applied = _last(survivors)
    if any(applied not in {one.live, one.prepared} for one in survivors):
        return None
    if all(one.prepared == applied + 1 for one in survivors):
        return frozenset({applied, applied + 1})
    return frozenset({applied})


def _last(ranks: Sequence[RankHolding]) -> int:
    """Return the last step that any rank has applied."""
    return max(one.live for one in ranks if one.live is not None)


def _apart(ranks: Sequence[RankHolding]) -> dict[int, str]:
    """Say of survivors that are at steps that no vote explains where they are."""
    at = _listed([f"rank {one.rank} at {one.live}" for one in ranks if one.live is not None])
    return {_last(ranks): f"the ranks that live are at steps that do not go together: {at}"}


def _newer(ranks: Sequence[RankHolding], step: int) -> frozenset[int]:
    """Return the survivors that hold or are prepared for something newer than *step*."""
    return frozenset(one.rank for one in ranks if max(one.live or 0, one.prepared or 0) > step)


class _Scene:
    """Who holds what of one step."""

    def __init__(self, ranks: Sequence[RankHolding], moment: Moment, certain: frozenset[int] | None, stored: Sequence[SnapshotRef]) -> None:
        self.ranks, (self.step, self.lineage) = ranks, moment
        self.shards: dict[str, list[int]] = defaultdict(list)
        self.rank_states: dict[int, list[int]] = defaultdict(list)
        self.live: set[int] = set()
        self.forward: set[int] = set()
        lives = certain is not None and _lineage(ranks) == self.lineage
        for one in ranks:
            self._take(one, certain if lives else None)
        self.stored = [one for one in stored if one.moment == moment]
        self.cuts: dict[str, dict[int, dict[int, list[SnapshotRef]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for kept in self.stored:
            self.cuts[kept.shard][kept.parts][kept.part].append(kept)

    def _take(self, one: RankHolding, certain: frozenset[int] | None) -> None:
        """Note what *one* holds of the step."""
        if certain is not None and one.prepared == self.step and self.step in certain:
            self.forward.add(one.rank)
        if (certain is not None and one.live == self.step) or one.rank in self.forward:
            self.live.add(one.rank)
            self.shards[one.shard].append(one.rank)
        if certain is not None:
            for rank in (rank for rank, steps in one.rank_states.items() if self.step in steps and rank != one.rank):
                self.rank_states[rank].append(one.rank)

    def lack(self) -> str:
        """Say what of the step nobody holds; nothing if it is whole."""
        without: dict[str, list[int]] = defaultdict(list)
        for one in self.ranks:
            if one.shard not in self.shards and not self._parts(one):
                without[one.shard].append(one.rank)
        dark = [
            one.rank for one in self.ranks if one.rank not in self.live and not self.rank_states.get(one.rank) and not self._rank_state(one)
        ]
        said = [f"the state of {_named(ranks)}" for _, ranks in sorted(without.items(), key=lambda item: item[1])]
        if dark:
            said.append(f"the generators and the position in the data of {_named(dark)}")
        return f"nobody has {' or '.join(said)} at step {self.step}" if said else ""

    def whole(self) -> str:
        """Say where all of the step is."""
        if not self._fetches():
            return f"the ranks that live hold all of step {self.step}"
        return f"the memory of nodes {'and the ranks that live have' if self.live else 'has'} all of step {self.step}"

    def _parts(self, one: RankHolding) -> tuple[SnapshotRef, ...]:
        """Return the parts of the piece of *one*, the nearest of each; nothing unless all are there."""
        whole = [(parts, cut) for parts, cut in sorted(self.cuts.get(one.shard, {}).items()) if len(cut) == parts]
        if not whole:
            return ()
        _, cut = whole[0]
        return tuple(self._nearest(one, cut[part]) for part in sorted(cut))

    def _rank_state(self, one: RankHolding) -> SnapshotRef | None:
        """Return the nearest snapshot that has the light state of *one*."""
        found = [kept for kept in self.stored if kept.rank == one.rank]
        return self._nearest(one, found) if found else None

    def _nearest(self, one: RankHolding, found: Sequence[SnapshotRef]) -> SnapshotRef:
        """Return the one that lies on the node of *one*, or one of the others, each rank another."""
        near = [kept for kept in found if kept.node == one.node]
        return near[0] if near else found[one.rank % len(found)]

    def plan(self, reason: str, most: int) -> RestorePlan:
        """Return the plan for the step, which is whole."""
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
        """Return the transfers, the load spread evenly over those who have the piece."""
        load: dict[int, Fraction] = defaultdict(Fraction)
        found = []
        for one in self.ranks:
            if one.rank in self.live or one.shard not in self.shards:
                continue
            sources = sorted(_least_loaded(self.shards[one.shard], load, one.rank, most))
            for share, source in enumerate(sources):
                load[source] += Fraction(1, len(sources))
                found.append(Transfer(shard=one.shard, source=source, target=one.rank, share=share, shares=len(sources)))
        return tuple(found)

    def _fetches(self) -> tuple[Fetch, ...]:
        """Return what no rank that lives can give."""
        found = []
        for one in self.ranks:
            if one.rank in self.live:
                continue
            parts = () if one.shard in self.shards else self._parts(one)
            rank_state = None if self.rank_states.get(one.rank) else self._rank_state(one)
            if parts or rank_state:
                found.append(Fetch(target=one.rank, parts=parts, rank_state=rank_state))
        return tuple(found)


def _least_loaded(holders: Sequence[int], load: Mapping[int, Fraction], target: int, most: int) -> list[int]:
    """Return up to *most* of *holders*, those with the least to send; of equals, those that follow *target* in the ring of ranks."""
    ring = sorted(holders, key=lambda rank: (rank < target, rank))
    return sorted(ring, key=lambda rank: load.get(rank, Fraction()))[:most]


def _reason(said: str, lacking: Mapping[int, str]) -> str:
    """Return why this step, and why not the newest of those that are *lacking* something."""
    return f"{said}; {lacking[max(lacking)]}" if lacking else said


def _named(ranks: Sequence[int]) -> str:
    """Return *ranks* as a sentence names them."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed([str(rank) for rank in ranks])}"


def _listed(names: Sequence[str]) -> str:
    """Return *names* as a sentence lists them, the first few by name."""
    if len(names) > _NAMED:
        names = [*names[: _NAMED - 1], f"{len(names) - _NAMED + 1} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
