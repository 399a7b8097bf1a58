"""The rank table: what the processes of a generation must know about each other beyond the membership; it is recorded in the history."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from holdfast.detectors.codec import packed, unpacked
from holdfast.policies.nodes.placement import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareLocalRanks:
    """The local ranks, and so the GPUs, that hot spares have."""

    taking: Mapping[int, int] = field(default_factory=dict)
    """Rank to the local rank of the hot spare that takes it."""
    parked: Mapping[str, AbstractSet[int]] = field(default_factory=dict)
    """Node to the local ranks of those that wait on there."""
    per_node: int = 0
    """Ranks of a node, and so its local ranks."""

    def lowest_free(self, node: str, taken: AbstractSet[int]) -> int:
        """Return the lowest local rank of *node* that is not *taken*: one that no waiting hot spare has, if there is one."""
        parked = self.parked.get(node, frozenset[int]())
        free = (place for place in range(self.per_node) if place not in taken and place not in parked)
        return next(free, next(place for place in range(len(taken) + 1) if place not in taken))


NO_SPARES: Final = SpareLocalRanks()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """The processes of one generation."""

    incarnations: dict[int, int] = field(default_factory=dict)
    """Rank to the generation in which its process took it; another number means another process."""
    places: dict[int, int] = field(default_factory=dict)
    """Rank to its local rank: a process that is kept keeps it, whichever others join or leave."""
    store: tuple[str, int] = ("", 0)
    serve: int = 0
    """The rank that hosts the store."""
    since: int = 0
    """The previous generation of the kept processes."""
    kept: tuple[int, ...] = ()
    joined: int = 0
    """The newest generation that all its processes joined: later ones may hold no state yet."""
    width: int = 0
    """Number of ranks when none is vacant: the world size that new processes are built for."""
    every: int | None = None
    """Steps between two checkpoints, where the controller chooses them: the same for all processes of a generation."""
    invalidated: tuple[tuple[int, int], ...] = ()
    """States that no process may resume from: (step, generation), all from that step on of generations before that one."""
    skip: tuple[int, ...] = ()
    """Steps that are trained with the batches after theirs."""

    @classmethod
    def fresh(cls, generation: int, membership: Membership, store: tuple[str, int], *, every: int | None = None) -> Self:
        """Return the table of a generation in which every process is new."""
        ranks = [rank for here in membership.values() for rank in here]
        places = {rank: place for here in membership.values() for place, rank in enumerate(here)}
        return cls(
            incarnations=dict.fromkeys(ranks, generation),
            places=places,
            store=store,
            serve=min(ranks, default=0),
            joined=generation,
            width=len(ranks),
            every=every,
        )

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Return the table that `as_record` wrote."""
        table = unpacked(cls, record)
        return table if table.width else replace(table, width=len(table.incarnations))

    def as_record(self) -> dict[str, Any]:
        """Return the table as JSON."""
        record: dict[str, Any] = packed(self)
        return record

    def rolled_back(self, before: Self, step: int, skip: tuple[int, ...]) -> Self:
        """Return this fresh table with the states that *before* had invalidated, and those made until now from *step* on."""
        own = ((step, max(self.incarnations.values())),) if step else ()
        return replace(self, invalidated=(*before.invalidated, *own), skip=tuple(sorted({*before.skip, *skip})))

    def spans(self) -> list[list[int]]:
        """Return the incarnations as processes get them: first and last rank of each run of ranks with the same number, and the number."""
        found: list[list[int]] = []
        for rank, number in sorted(self.incarnations.items()):
            if found and found[-1][1] == rank - 1 and found[-1][2] == number:
                found[-1][1] = rank
            else:
                found.append([rank, rank, number])
        return found

    @property
    def changed(self) -> list[int]:
        """Return the ranks whose processes are new: in this generation, or in an earlier one that failed."""
        return sorted(rank for rank, number in self.incarnations.items() if number > self.joined)

    def after(self, generation: int, membership: Membership, changed: frozenset[int], spares: SpareLocalRanks = NO_SPARES) -> Self:
        """Return the table of the next *generation*, in which the ranks *changed* have new processes.

        A hot spare keeps its own local rank, fresh processes get the lowest free ones. Ranks that are not in *membership* are vacant.
        """
        present = {rank for here in membership.values() for rank in here}
        stay = present - changed
        places = {rank: place for rank, place in self.places.items() if rank in stay}
        for node, here in membership.items():
            taken = {places[rank] for rank in here if rank in places}
            for rank in sorted(changed & set(here), key=lambda rank: (rank not in spares.taking, rank)):
                own = spares.taking.get(rank)
                places[rank] = own if own is not None and own not in taken else spares.lowest_free(node, taken)
                taken.add(places[rank])
        incarnations = {rank: number for rank, number in self.incarnations.items() if rank in present}
        incarnations |= dict.fromkeys(changed, generation)
        return replace(self, incarnations=incarnations, places=places, kept=tuple(sorted(incarnations.keys() - changed)))
