"""From what every rank of a new generation holds to a plan by which all of them hold one step, or the reason why there is none.

Pure, and on the standard library alone: every rank computes the plan for itself from the same holdings and arrives at the
same one, so nobody has to tell it to the others.

Each rank needs its *piece* of the training (ranks that are copies of each other need the same piece: all ranks under plain
data parallelism, the ranks of one stage in a pipeline, nobody else when everything is sharded) and its own *light* state:
random generators, and the position in the data. Both must be of the same step on all ranks. A piece comes from

- *live* state: a survivor is at that step, or is prepared for it (it voted for the step, still has the gradients, and does not
  know whether the step counts) and it is certain that the step counts;
- a *snapshot*: the copy that a survivor keeps in memory of its own piece at an earlier step;
- a *replica*: such a copy of another's piece;
- a checkpoint: on disk, whole, for everybody to read, light states and all.

The newest step that is whole wins; at that step the first of these sources that has the piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Final

MOST_SOURCES: Final = 8
"""Ranks that one rank takes its piece from: so many fill any link, and more are only more connections to make."""
_NAMED: Final = 4
"""Ranks that a sentence lists."""


class Kind(StrEnum):
    """Where in its source's memory a piece lies, the fastest first."""

    LIVE = "live"
    SNAPSHOT = "snapshot"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the process of one rank of the new generation needs, and what it holds; a new process holds nothing."""

    rank: int
    piece: str
    """The name of the piece that this rank needs, and that its live state and its snapshots are of."""
    live: int | None = None
    """The last step that it has applied; with it goes its own light state of that step."""
    prepared: int | None = None
    """The step after `live`, if it voted for that and does not know the outcome; it holds its light states of both."""
    snapshots: frozenset[int] = frozenset()
    """Steps of which it keeps its own piece and light state in memory."""
    replicas: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Steps of which it keeps other pieces in memory, by piece."""
    lights: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Steps of which it keeps light states for other ranks, by rank."""

    def __post_init__(self) -> None:
        if self.prepared is not None and (self.live is None or self.prepared != self.live + 1):
            raise ValueError(f"rank {self.rank} cannot be prepared for step {self.prepared} with step {self.live} as its last")
        if self.piece in self.replicas:  # a snapshot has a light state with it, so the two must not be mixed up
            raise ValueError(f"rank {self.rank} keeps its own piece in memory: that is a snapshot, not a replica")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One share of a piece, on its way from one rank to another."""

    piece: str
    source: int
    target: int
    kind: Kind
    share: int
    """Counted from 0."""
    shares: int
    """Into how many the piece is cut for this target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How all ranks come to hold `step`."""

    step: int
    because: str
    """Why this step, in plain words."""
    roll_forward: frozenset[int] = frozenset()
    """Ranks that apply the step they are prepared for. They do so first: some of them may be sources."""
    roll_back: frozenset[int] = frozenset()
    """Survivors that give up something newer: a step that they are prepared for, or steps that they have applied."""
    restore: frozenset[int] = frozenset()
    """Ranks that go back to their own snapshot of the step, its light state with it."""
    transfers: tuple[Transfer, ...] = ()
    """What goes from rank to rank, by target and share; a rank that is no target holds its piece itself."""
    lights: tuple[tuple[int, int], ...] = ()
    """(source, target) of each light state that its rank does not hold itself, by target."""
    checkpoint: bool = False
    """Everybody reads the checkpoint of the step, pieces and light states; nothing goes from rank to rank."""


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No step is whole."""

    why: str
    """What is lacking, in plain words."""


def plan(holdings: Iterable[Holding], checkpoints: Iterable[int] = (), *, most: int = MOST_SOURCES) -> Plan | NoPlan:
    """Return how all ranks come to hold the newest step that can be had whole.

    Args:
        holdings: one for every rank of the generation, in any order.
        checkpoints: steps whose checkpoints are whole; everybody must be given the same.
        most: ranks that one rank takes its piece from at most.
    """
    if most < 1:
        raise ValueError(f"most={most}: a piece comes from one rank at least")
    ranks = _in_order(holdings)
    on_disk = frozenset(checkpoints)
    certain = _certain(ranks)
    lacking = _apart(ranks) if certain is None else {}
    for step in sorted(_steps(ranks, certain) | on_disk, reverse=True):
        scene = _Scene(ranks, step, certain)
        lack = scene.lack()
        if not lack:
            return scene.plan(_because(f"the ranks that live hold all of step {step}", lacking), most)
        if step in on_disk:
            because = _because(f"the checkpoint of step {step} is whole", lacking or {step: lack})
            return Plan(step=step, because=because, roll_back=_newer(ranks, step), checkpoint=True)
        lacking[step] = lack
    what = lacking[max(lacking)] if lacking else "no rank holds any state"
    return NoPlan(f"{what}, and there is no whole checkpoint")


def _in_order(holdings: Iterable[Holding]) -> Sequence[Holding]:
    """Return *holdings* by rank, each once."""
    ranks = sorted(holdings, key=lambda one: one.rank)
    if len({one.rank for one in ranks}) != len(ranks):
        raise ValueError("a rank has two holdings")
    return ranks


def _steps(ranks: Sequence[Holding], certain: frozenset[int] | None) -> set[int]:
    """Return every step that somebody holds a piece of and that may count."""
    live = set() if certain is None else {one.live for one in ranks if one.live is not None} | certain
    return live.union(*(one.snapshots for one in ranks), *(steps for one in ranks for steps in one.replicas.values()))


def _certain(ranks: Sequence[Holding]) -> frozenset[int] | None:
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


def _last(ranks: Sequence[Holding]) -> int:
    """Return the last step that any rank has applied."""
    return max(one.live for one in ranks if one.live is not None)


def _apart(ranks: Sequence[Holding]) -> dict[int, str]:
    """Say of survivors that are at steps that no vote explains where they are."""
    at = _listed([f"rank {one.rank} at {one.live}" for one in ranks if one.live is not None])
    return {_last(ranks): f"the ranks that live are at steps that do not go together: {at}"}


def _newer(ranks: Sequence[Holding], step: int) -> frozenset[int]:
    """Return the survivors that hold or are prepared for something newer than *step*."""
    return frozenset(one.rank for one in ranks if max(one.live or 0, one.prepared or 0) > step)


class _Scene:
    """Who holds what of one step."""

    def __init__(self, ranks: Sequence[Holding], step: int, certain: frozenset[int] | None) -> None:
        self.ranks, self.step = ranks, step
        self.pieces: dict[str, dict[Kind, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.lights: dict[int, list[int]] = defaultdict(list)
        self.live: set[int] = set()
        self.forward: set[int] = set()
        self.restore: set[int] = set()
        for one in ranks:
            self._take_own(one, certain)
            self._take_kept(one)

    def _take_own(self, one: Holding, certain: frozenset[int] | None) -> None:
        """Note what *one* holds of its own piece at the step."""
        if certain is not None and one.prepared == self.step and self.step in certain:
            self.forward.add(one.rank)
        if (certain is not None and one.live == self.step) or one.rank in self.forward:
            self.live.add(one.rank)
            self.pieces[one.piece][Kind.LIVE].append(one.rank)
        if self.step in one.snapshots:
            self.pieces[one.piece][Kind.SNAPSHOT].append(one.rank)
            if one.rank not in self.live:
                self.restore.add(one.rank)

    def _take_kept(self, one: Holding) -> None:
        """Note what *one* keeps for others of the step."""
        for piece in (piece for piece, steps in one.replicas.items() if self.step in steps):
            self.pieces[piece][Kind.REPLICA].append(one.rank)
        for rank in (rank for rank, steps in one.lights.items() if self.step in steps and rank != one.rank):
            self.lights[rank].append(one.rank)

    def lack(self) -> str:
        """Say what of the step nobody holds; nothing if it is whole."""
        without: dict[str, list[int]] = defaultdict(list)
        for one in self.ranks:
            if one.piece not in self.pieces:
                without[one.piece].append(one.rank)
        dark = [one.rank for one in self.ranks if not self._has_all(one.rank) and not self.lights.get(one.rank)]
        said = [f"the state of {_named(ranks)}" for _, ranks in sorted(without.items(), key=lambda item: item[1])]
        if dark:
            said.append(f"the generators and the position in the data of {_named(dark)}")
        return f"nobody has {' or '.join(said)} at step {self.step}" if said else ""

    def _has_all(self, rank: int) -> bool:
        """Tell whether *rank* has both its piece and its light state itself."""
        return rank in self.live or rank in self.restore

    def plan(self, because: str, most: int) -> Plan:
        """Return the plan for the step, which is whole."""
        return Plan(
            step=self.step,
            because=because,
            roll_forward=frozenset(self.forward),
            roll_back=_newer(self.ranks, self.step),
            restore=frozenset(self.restore),
            transfers=self._transfers(most),
            lights=self._lights(),
        )

    def _transfers(self, most: int) -> tuple[Transfer, ...]:
        """Return the transfers, the load spread evenly over those who have the piece."""
        load: dict[int, Fraction] = defaultdict(Fraction)
        found = []
        for one in self.ranks:
            if self._has_all(one.rank):
                continue
            kind, holders = next((kind, self.pieces[one.piece][kind]) for kind in Kind if kind in self.pieces[one.piece])
            sources = sorted(_least_loaded(holders, load, one.rank, most))
            for share, source in enumerate(sources):
                load[source] += Fraction(1, len(sources))
                found.append(Transfer(piece=one.piece, source=source, target=one.rank, kind=kind, share=share, shares=len(sources)))
        return tuple(found)

    def _lights(self) -> tuple[tuple[int, int], ...]:
        """Return who gives a light state to whom."""
        return tuple((min(self.lights[one.rank]), one.rank) for one in self.ranks if not self._has_all(one.rank))


def _least_loaded(holders: Sequence[int], load: Mapping[int, Fraction], target: int, most: int) -> list[int]:
    """Return up to *most* of *holders*, those with the least to send; of equals, those that follow *target* in the ring of ranks."""
    ring = sorted(holders, key=lambda rank: (rank < target, rank))
    return sorted(ring, key=lambda rank: load.get(rank, Fraction()))[:most]


def _because(said: str, lacking: Mapping[int, str]) -> str:
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
