"""What the processes of a generation have to know of each other, beside who is where: on record, so that the next flow knows it too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from detectors.codec import packed, unpacked
from policies.placement import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """The processes of one generation."""

    incarnations: dict[int, int] = field(default_factory=dict)
    """Rank to the generation in which its process took it: another number means another process."""
    places: dict[int, int] = field(default_factory=dict)
    """Rank to its local rank: a process that lives on keeps it, whoever else comes or goes."""
    store: tuple[str, int] = ("", 0)
    serve: int = 0
    """The rank that hosts the store."""
    since: int = 0
    """The generation before, for the processes that were kept."""
    kept: tuple[int, ...] = ()
    joined: int = 0
    """The newest generation that every process in it has joined: who came later may hold no state yet."""
    width: int = 0
    """Ranks when no place is vacant: what a process that comes is built for."""
    every: int | None = None
    """Steps between two checkpoints, where the flow chooses them: all processes of a generation must go by the same number."""
    written_off: tuple[tuple[int, int], ...] = ()
    """States that nobody goes on from: from so many steps on, of generations before that one."""
    skip: tuple[int, ...] = ()
    """Steps that are done with the batches that follow theirs."""

    @classmethod
    def fresh(cls, generation: int, membership: Membership, store: tuple[str, int], *, every: int | None = None) -> Self:
        """Return the line-up of a generation in which every process is new."""
        ranks = [rank for held in membership.values() for rank in held]
        places = {rank: place for held in membership.values() for place, rank in enumerate(held)}
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
        """Return the line-up that `as_record` wrote."""
        table = unpacked(cls, record)
        return table if table.width else replace(table, width=len(table.incarnations))

    def as_record(self) -> dict[str, Any]:
        """Return the line-up as JSON."""
        told: dict[str, Any] = packed(self)
        return told

    def going_back(self, before: Self, step: int, skip: tuple[int, ...]) -> Self:
        """Return this fresh line-up with what the one *before* it had written off, and from *step* on all that was made until now."""
        own = ((step, max(self.incarnations.values())),) if step else ()
        return replace(self, written_off=(*before.written_off, *own), skip=tuple(sorted({*before.skip, *skip})))

    def spans(self) -> list[list[int]]:
        """Return the incarnations as processes are told of them: first and last rank of each run of ranks that have the same number."""
        found: list[list[int]] = []
        for rank, number in sorted(self.incarnations.items()):
            if found and found[-1][1] == rank - 1 and found[-1][2] == number:
                found[-1][1] = rank
            else:
                found.append([rank, rank, number])
        return found

    @property
    def changed(self) -> list[int]:
        """Return the ranks whose processes are new: in this generation, or in one before it that came to nothing."""
        return sorted(rank for rank, number in self.incarnations.items() if number > self.joined)

    def after(self, generation: int, membership: Membership, changed: frozenset[int]) -> Self:
        """Return the line-up of the next *generation*, in which the ranks *changed* have new processes at the lowest places free.

        Ranks that *membership* does not have are vacant.
        """
        present = {rank for held in membership.values() for rank in held}
        stay = present - changed
        places = {rank: place for rank, place in self.places.items() if rank in stay}
        for held in membership.values():
            for rank in sorted(changed & set(held)):
                taken = {places[other] for other in held if other in places}
                places[rank] = next(place for place in range(len(taken) + 1) if place not in taken)
        lived = {rank: number for rank, number in self.incarnations.items() if rank in present}
        incarnations = {**lived, **dict.fromkeys(changed, generation)}
        return replace(self, incarnations=incarnations, places=places, kept=tuple(sorted(incarnations.keys() - changed)))
