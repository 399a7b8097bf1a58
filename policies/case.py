"""What a rule of the ladder may know, and what it can answer.

A `Case` holds all that a rule may know, its own *now* included. A rule that does not answer says why (`Pass`), so that a person can later
read which rules were passed over; one that only has something to say about the case hands it on with that (`Noted`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from detectors.catalogue import CATALOGUE_ACTIONS, Blame, Fault, RecommendedAction, RecommendedActions
from detectors.diagnosis import Diagnosis
from detectors.node import NODE_LEAVING

_HARDWARE: Final = frozenset({Blame.GPU, Blame.NODE})


class RecoveryAction(StrEnum):
    """What can be done about an incident, finest first."""

    RETRY_STEP = "retry-step"
    TAKE_OVER = "take-over"
    NARROW = "narrow"
    RESTART_IN_PLACE = "restart-in-place"
    GO_BACK = "go-back"
    REPLACE_NODE = "replace-node"
    SHRINK = "shrink"
    ASK_A_PERSON = "ask-a-person"
    WAIT_FOR_CAPACITY = "wait-for-capacity"
    GIVE_UP = "give-up"


IN_PROCESS: Final = frozenset({RecoveryAction.RETRY_STEP, RecoveryAction.TAKE_OVER, RecoveryAction.NARROW})
"""Actions at which the ranks that live stay in their processes."""


ModelCopies = tuple[tuple[int, ...], ...]
"""Copies of the model: of each the ranks that hold it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRecovery:
    """One earlier recovery of this job."""

    at: float
    action: RecoveryAction
    node: str | None
    """The node the root fault spoke against."""
    made_progress: bool
    """Whether the job made a step it had never made before, until the next fault."""
    interrupted: bool = False
    """It was a take-over, and another loss came while it was being carried out: that says nothing about the script."""
    kind: str = ""
    """Catalogue kind of the root fault; empty where nobody knows it any more."""
    step: int | None = None
    """The step that the root fault came at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFault:
    """A fault of the past, as far as rules count it: one row each time that it came."""

    kind: str
    at: float
    node: str
    device: str = ""
    """The part of the node, where that is known."""
    incident: str = ""
    """What tells its incident from others; empty where training went on through it."""
    root: bool = False
    """It was what its incident was taken for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryBudget:
    """How often recovery may be tried."""

    in_place: int = 3
    """Restarts in place on one node within the window."""
    window: float = 3600.0
    """Seconds."""
    recoveries: int = 20
    """Recoveries of the job within the window."""
    fruitless: int = 3
    """Recoveries in a row without a new step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpare:
    """A process that has warmed up and waits for a rank."""

    id: int
    node: str
    role: int | None = None
    """The role it parked in, by its place among the job's roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
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
    past: tuple[PastRecovery, ...] = ()
    tried: tuple[RecoveryAction, ...] = ()
    """Actions that failed already in this incident."""
    budget: RecoveryBudget = RecoveryBudget()
    blocked_reason: str = "the job's process groups are not Holdfast's own"
    """Why the ranks that live cannot be kept in their processes; empty when they can."""
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Which node holds which ranks now; after a take-over a node may hold fewer than the others."""
    dead: frozenset[int] = frozenset()
    """Ranks without a process that runs."""
    standbys: tuple[HotSpare, ...] = ()
    """Those that are ready."""
    roles: tuple[tuple[int, ...], ...] = ()
    copies: ModelCopies = ()
    """Copies of the model that share out the samples of each step; none where each rank has samples of its own."""
    replacement_attempts: int = 0
    """Take-overs that were begun in this incident."""
    seated: frozenset[int] = frozenset()
    """Ranks in processes that the last of them brought, and that have come to no step yet."""
    recommended_actions: RecommendedActions = CATALOGUE_ACTIONS
    """How much faults ask for: the one place where a rule learns it."""
    earlier: tuple[PastFault, ...] = ()
    """Faults of the past of the kinds seen now, oldest first; none of those that this incident is about."""
    common: frozenset[str] = frozenset()
    """Kinds that came on so many nodes that none of these is to blame: noted by a rule."""
    worn: frozenset[str] = frozenset()
    """Nodes that had the same fault too often, and leave while there are spares: noted by a rule."""
    notes: tuple[str, ...] = ()
    """What rules noted, in words."""
    approval_possible: bool = False
    """A person may be asked before the job is left with fewer nodes than it needs."""
    approved: frozenset[str] = frozenset()
    """Nodes that may go below that, as a person said, or as nobody said otherwise in time."""
    kept: frozenset[str] = frozenset()
    """Nodes that a person keeps in service in spite of the faults seen on them."""

    @property
    def reason(self) -> str:
        """Return what was seen, and what rules noted of it."""
        return "; ".join((self.diagnosis.reason, *self.notes, *self._not_again()))

    def _not_again(self) -> Iterator[str]:
        """Say which nodes get no rank again because the fault asks for a device reset, and which do by a person's decision."""
        for node in self.members:
            kinds = dict.fromkeys(fault.kind for fault in self._needs_reset() if fault.node == node)
            if node in self.kept:
                yield f"a person keeps {node} in service"
            if kinds:
                yield f"{', '.join(kinds)} asks for a device reset, which Holdfast does not do: no rank is started on {node} again"

    @property
    def is_common(self) -> bool:
        """Tell whether what is the matter is the matter on many nodes, and no node of its own is lost for it."""
        return self.diagnosis.root.kind in self.common

    def against_nodes(self) -> tuple[Fault, ...]:
        """Return the faults for which the nodes they were seen on have to answer."""
        against = (fault for fault in self.diagnosis.against_nodes() if fault.node and fault.kind not in self.common)
        return tuple(fault for fault in against if fault.node not in self.kept)

    @property
    def announced(self) -> frozenset[str]:
        """Nodes that are about to be taken away: that was said already, and nobody need be asked."""
        seen = (self.diagnosis.root, *self.diagnosis.secondary_failures)
        return frozenset(fault.node for fault in seen if fault.kind == NODE_LEAVING.id and fault.node)

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes that cannot hold ranks now: the lost ones and those that a fault asks to leave, root or not.

        Nothing resets devices, so a node whose ranks were stopped by a fault that asks for a reset leaves: the same error would stop them
        again. Other nodes leave only while there are spares to take their places: those whose ranks went on through such a fault, those
        that should be evicted once they are idle (they are, if that fault is the root), and those that had the same fault too often.
        """
        against, root = self.against_nodes(), self.diagnosis.root
        evicted = {fault.node for fault in against if self.recommended_actions.of(fault) is RecommendedAction.EVICT}
        surely = self.lost | {node for node in evicted | {fault.node for fault in self._needs_reset()} if node}
        idle = {fault.node for fault in against if self.recommended_actions.of(fault) is RecommendedAction.DRAIN and fault is root}
        reset = {fault.node for fault in against if self._is_reset(fault)}
        while_spares = surely | self.worn | {node for node in reset | idle if node}
        return while_spares if len(while_spares & set(self.members)) <= len(self.spares) else surely

    def _needs_reset(self) -> list[Fault]:
        """Return the faults that stopped ranks and ask for a device reset."""
        return [one for one in self.against_nodes() if self._is_reset(one) and (one is self.diagnosis.root or one.rank is not None)]

    def _is_reset(self, fault: Fault) -> bool:
        return self.recommended_actions.of(fault) is RecommendedAction.RESET_GPU and fault.entry.blame in _HARDWARE

    @property
    def unfit(self) -> tuple[str, ...]:
        """Members that cannot hold ranks now."""
        leaving = self.leaving
        return tuple(node for node in self.members if node in leaving)

    @property
    def bad(self) -> tuple[str, ...]:
        """Members that have to go at any action above a restart in place: the unfit ones, or else the root fault's own."""
        own = None if self.is_common else self.diagnosis.root.node
        return self.unfit or tuple(node for node in self.members if node == own)

    def failed(self, action: RecoveryAction) -> bool:
        """Tell whether *action* failed already in this incident; nodes lost since then are a new question."""
        return action in self.tried and not self.lost

    def recent(self) -> list[PastRecovery]:
        """Return the recoveries within the budget's window."""
        return [one for one in self.past if self.now - one.at < self.budget.window]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why, in words that go unchanged into log, history, UI and CLI."""

    action: RecoveryAction
    reason: str
    drop: tuple[str, ...] = ()
    """Members that leave."""
    add: tuple[str, ...] = ()
    """Spares that take their places."""
    need: int = 0
    """Nodes to wait for."""
    seats: tuple[Placement, ...] = ()
    """Who goes on with the ranks that a take-over replaces; all others stay in their processes."""
    vacate: tuple[int, ...] = ()
    """Ranks that nobody goes on with."""
    rotate: bool = False
    """Give every rank to another node, so that a failure that follows the rank is told from one that stays with the node."""
    before: int = 0
    """Go on from a state of fewer steps, as all others of this generation are spoiled; 0: from the newest."""
    skip: tuple[int, ...] = ()
    """Steps that are done with the batches that follow theirs."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Not mine, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Not mine to decide, but the rules after me should know."""

    why: str
    case: Case
    """The case with what was noted."""


Rule = Callable[[Case], Decision | Pass | Noted]
