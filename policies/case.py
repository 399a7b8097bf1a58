"""What a rule of the ladder may know, and what it can answer.

A `Case` holds all that a rule may know, its own *now* included. A rule that does not answer says why (`Pass`), so that a person can later
read which rules were passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from detectors.catalogue import Level
from detectors.diagnosis import Diagnosis


class Rung(StrEnum):
    """What can be done about an incident, finest first."""

    TAKE_OVER = "take-over"
    RESTART_IN_PLACE = "restart-in-place"
    REPLACE_NODE = "replace-node"
    SHRINK = "shrink"
    WAIT_FOR_CAPACITY = "wait-for-capacity"
    GIVE_UP = "give-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One earlier recovery of this job."""

    at: float
    rung: Rung
    node: str | None
    """The node the root fault spoke against."""
    gained: bool
    """Whether the job made a step it had never made before, until the next fault."""
    overtaken: bool = False
    """It was a take-over, and another loss came while it was being carried out: that says nothing about the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How often recovery may be tried: seconds and counts."""

    in_place: int = 3
    window: float = 3600.0
    recoveries: int = 20
    fruitless: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    """A process that has warmed up and waits for a rank."""

    id: int
    node: str
    role: int | None = None
    """The role it parked in, by its place among the job's roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank whose process is lost goes on: in a standby, or in a fresh process."""

    rank: int
    node: str
    standby: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that a rule may know."""

    now: float
    diagnosis: Diagnosis
    members: tuple[str, ...]
    """Nodes that hold ranks, in the order of their ranks."""
    lost: frozenset[str] = frozenset()
    """Members that no longer answer, or cannot run workers."""
    spares: tuple[str, ...] = ()
    """Healthy nodes with an agent and no ranks."""
    least: int = 1
    past: tuple[Recovery, ...] = ()
    tried: tuple[Rung, ...] = ()
    """Rungs that failed already in this incident."""
    budget: Budget = Budget()
    barred: str = "the job's process groups are not Holdfast's own"
    """Why the ranks that live cannot be kept in their processes; empty when they can."""
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Which node holds which ranks now; after a take-over a node may hold fewer than the others."""
    dead: frozenset[int] = frozenset()
    """Ranks without a process that runs."""
    standbys: tuple[Standby, ...] = ()
    """Those that are ready."""
    roles: tuple[tuple[int, ...], ...] = ()
    takeovers: int = 0
    """Take-overs that were begun in this incident."""

    @property
    def unfit(self) -> tuple[str, ...]:
        """Members that cannot hold ranks now: the lost ones and those that a fault asks to leave, root or not."""
        faults = (self.diagnosis.root, *self.diagnosis.echoes)
        left = {fault.node for fault in faults if fault.entry.level is Level.EVICT_NOW} | self.lost
        return tuple(node for node in self.members if node in left)

    @property
    def bad(self) -> tuple[str, ...]:
        """Members that have to go at any rung above a restart in place: the unfit ones, or else the root fault's own."""
        return self.unfit or tuple(node for node in self.members if node == self.diagnosis.root.node)

    def failed(self, rung: Rung) -> bool:
        """Tell whether *rung* failed already in this incident; nodes lost since then are a new question."""
        return rung in self.tried and not self.lost

    def recent(self) -> list[Recovery]:
        """Return the recoveries within the budget's window."""
        return [one for one in self.past if self.now - one.at < self.budget.window]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why, in words that go unchanged into log, history, UI and CLI."""

    rung: Rung
    because: str
    drop: tuple[str, ...] = ()
    """Members that leave."""
    add: tuple[str, ...] = ()
    """Spares that take their places."""
    need: int = 0
    """Nodes to wait for."""
    seats: tuple[Seat, ...] = ()
    """Who goes on with the ranks that a take-over replaces; all others stay in their processes."""
    rotate: bool = False
    """Give every rank to another node, so that a failure that follows the rank is told from one that stays with the node."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Not mine, and why."""

    why: str


Rule = Callable[[Case], Decision | Pass]
