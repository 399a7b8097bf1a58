"""A live migration in progress: which ranks leave, which hot spares join, and what each has reported so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.policies.nodes.placement import Membership


@dataclass(slots=True, kw_only=True)
class MigrationState:
    """One live migration, from its plan to its result."""

    generation: int
    """The generation that it leads to."""
    leavers: frozenset[int]
    joiners: dict[int, int]
    """Rank to the hot spare that takes it."""
    ranks: frozenset[int]
    prepared: set[tuple[str, int]] = field(default_factory=set)
    """The processes that are ready: ("rank", its number) or ("hot_spare", its number)."""
    switched: set[tuple[str, int]] = field(default_factory=set)
    departed: set[int] = field(default_factory=set)
    pause: float = 0.0
    """Seconds for which the switch paused training: the slowest rank's."""
    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    membership: Membership = field(default_factory=dict)

    def note_prepared(self, who: tuple[str, int], generation: int) -> None:
        """Note a process that is ready for a planned *generation*: this one, or one that was cancelled."""
        if generation == self.generation:
            self.prepared.add(who)

    def note_refused(self, who: tuple[str, int], generation: int, why: str) -> None:
        """Note a process that cannot get ready for a planned *generation*, and why."""
        if generation == self.generation:
            self.refused[who] = why

    def note_switched(self, who: tuple[str, int], generation: int, seconds: float) -> None:
        """Note a process that has switched to a planned *generation*, which paused it for *seconds*."""
        if generation == self.generation:
            self.switched.add(who)
            self.pause = max(self.pause, seconds)

    @property
    def is_prepared(self) -> bool:
        """Return whether all processes are ready to switch."""
        return not self.refused and self.prepared >= self._processes(self.ranks)

    @property
    def is_done(self) -> bool:
        """Return whether all processes have switched, or departed."""
        return self.switched >= self._processes(self.ranks - self.leavers) and self.departed >= self.leavers

    @property
    def unprepared(self) -> str:
        """Name the processes that are not ready yet."""
        return ", ".join(f"{kind} {number}" for kind, number in sorted(self._processes(self.ranks) - self.prepared))

    def _processes(self, ranks: frozenset[int]) -> set[tuple[str, int]]:
        """Return the processes of *ranks*, and the hot spares that join."""
        return {("rank", rank) for rank in ranks} | {("hot_spare", one) for one in self.joiners.values()}
