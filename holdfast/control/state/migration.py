"""A planned move in work: who leaves, who comes, and what each of them has told so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.placement import Membership


@dataclass(slots=True, kw_only=True)
class MigrationState:
    """One planned move, from its plan until it has come to something."""

    generation: int
    """The one it leads to."""
    leavers: frozenset[int]
    joiners: dict[int, int]
    """Rank to the standby that it goes on in."""
    ranks: frozenset[int]
    prepared: set[tuple[str, int]] = field(default_factory=set)
    """Who is ready: ("rank", its number) or ("standby", its number)."""
    switched: set[tuple[str, int]] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    pause: float = 0.0
    """Seconds for which the change-over held training up: of the rank that took longest."""
    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    membership: Membership = field(default_factory=dict)

    def note_prepared(self, who: tuple[str, int], generation: int) -> None:
        """Learn who is ready for a planned *generation*: this move's, or one that was given up."""
        if generation == self.generation:
            self.prepared.add(who)

    def note_refused(self, who: tuple[str, int], generation: int, why: str) -> None:
        """Learn who cannot get ready for a planned *generation*."""
        if generation == self.generation:
            self.refused[who] = why

    def note_switched(self, who: tuple[str, int], generation: int, seconds: float) -> None:
        """Learn who has gone on into a planned *generation*, which held training up for so many *seconds*."""
        if generation == self.generation:
            self.switched.add(who)
            self.pause = max(self.pause, seconds)

    @property
    def is_prepared(self) -> bool:
        """Tell whether everybody is ready to change over."""
        return not self.refused and self.prepared >= {("rank", rank) for rank in self.ranks} | {
            ("standby", one) for one in self.joiners.values()
        }

    @property
    def is_done(self) -> bool:
        """Tell whether everybody has changed over, or left."""
        stay = {("rank", rank) for rank in self.ranks - self.leavers} | {("standby", one) for one in self.joiners.values()}
        return self.switched >= stay and self.left >= self.leavers

    def missing(self, told: set[tuple[str, int]]) -> str:
        """Say who has not *told* yet."""
        everybody = {("rank", rank) for rank in self.ranks} | {("standby", one) for one in self.joiners.values()}
        return ", ".join(f"{kind} {number}" for kind, number in sorted(everybody - told))
