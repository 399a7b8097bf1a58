"""Input and output of recovery rules: the `Case` of an incident, and what a rule returns for it.

A `Case` holds everything that a rule may read, including the current time. A rule returns a `Decision`, or `Pass` with the reason why it
does not apply, or `Noted`: the case with a remark for the rules after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, HARDWARE_OF_NODE, Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.diagnosis import Diagnosis
from holdfast.detectors.nodes.node import NODE_LEAVING
from holdfast.policies.recovery.rank_map import RankMap, in_order


class RecoveryAction(StrEnum):
    """What a controller can do about an incident, least disruptive first."""

    RETRY_STEP = "retry-step"
    REPLACE_RANKS = "replace-ranks"
    SHRINK_LIVE = "shrink-live"
    RESTART_WORKERS = "restart-workers"
    ROLLBACK = "rollback"
    REPLACE_NODE = "replace-node"
    SHRINK_RESTART = "shrink-restart"
    REQUEST_APPROVAL = "request-approval"
    WAIT_FOR_CAPACITY = "wait-for-capacity"
    FAIL = "fail"


IN_PROCESS: Final = frozenset({RecoveryAction.RETRY_STEP, RecoveryAction.REPLACE_RANKS, RecoveryAction.SHRINK_LIVE})
"""Actions that keep the live ranks in their processes."""


ModelCopies = tuple[tuple[int, ...], ...]
"""Copies of the model: the ranks that together hold each one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRecovery:
    """One earlier recovery of this job."""

    at: float
    action: RecoveryAction
    node: str | None
    """Node of the root fault."""
    made_progress: bool
    """Whether the job finished a new step before the next fault."""
    interrupted: bool = False
    """It replaced ranks, and another rank was lost meanwhile, which is not the script's fault."""
    kind: str = ""
    """Fault kind of the root cause; empty if unknown."""
    step: int | None = None
    """Step of the root fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFault:
    """One occurrence of a fault in the past."""

    kind: str
    at: float
    node: str
    device: str = ""
    """Part of the node, if known."""
    incident: str = ""
    """Id of its incident; empty if training continued through it."""
    root: bool = False
    """It was the root cause of its incident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryBudget:
    """Limits on recoveries."""

    max_restarts_in_place: int = 3
    """Restarts of the workers on one node within the window."""
    recovery_window: float = 3600.0
    """Seconds."""
    max_recoveries: int = 20
    """Recoveries of the job within the window."""
    max_recoveries_without_progress: int = 3
    """Consecutive recoveries without a new step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpare:
    """A warm process that waits to take a rank."""

    id: int
    node: str
    role: int | None = None
    """Index of its role among the job's roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a lost rank continues: in a hot spare, or in a new process."""

    rank: int
    node: str
    hot_spare: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that a rule may read about an incident."""

    now: float
    diagnosis: Diagnosis
    members: tuple[str, ...]
    """Nodes with ranks, in rank order."""
    lost: frozenset[str] = frozenset()
    """Members that are unreachable or cannot run workers."""
    spares: tuple[str, ...] = ()
    """Healthy nodes with an agent and no ranks."""
    least: int = 1
    past: tuple[PastRecovery, ...] = ()
    tried: tuple[RecoveryAction, ...] = ()
    """Actions that failed in this incident."""
    budget: RecoveryBudget = RecoveryBudget()
    blocked_reason: str = "the job's process groups are not Holdfast's own"
    """Why live ranks cannot stay in their processes; empty if they can."""
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Node to its ranks. After ranks were replaced, nodes may have different numbers of ranks."""
    dead: frozenset[int] = frozenset()
    """Ranks without a running process."""
    hot_spares: tuple[HotSpare, ...] = ()
    """Hot spares that are ready."""
    roles: tuple[tuple[int, ...], ...] = ()
    copies: ModelCopies = ()
    """Copies of the model that split the samples of each step; none if each rank has its own samples."""
    replacement_attempts: int = 0
    """Attempts to replace ranks in this incident."""
    seated: frozenset[int] = frozenset()
    """Ranks in processes that the last attempt started and that have not finished a step yet."""
    recommended_actions: RecommendedActions = CATALOGUE_ACTIONS
    """Recommended actions of faults under the job's policy, with what confirms the diagnosed ones."""
    earlier: tuple[PastFault, ...] = ()
    """Past faults of the kinds seen now, oldest first, without those of this incident."""
    correlated: frozenset[str] = frozenset()
    """Kinds seen on so many nodes that none of them is at fault; set by a rule."""
    worn: frozenset[str] = frozenset()
    """Nodes with a recurring fault, which are replaced while there are spares; set by a rule."""
    notes: tuple[str, ...] = ()
    """Remarks of rules."""
    approval_possible: bool = False
    """An approval may be requested before the job is left with too few nodes."""
    approved: frozenset[str] = frozenset()
    """Nodes that may be isolated nevertheless: approved, or the request expired."""
    kept: frozenset[str] = frozenset()
    """Nodes that a person keeps in service despite their faults."""

    def __post_init__(self) -> None:
        confirming = replace(self.recommended_actions, confirmed=self.diagnosis.confirmed)
        object.__setattr__(self, "recommended_actions", confirming)  # whoever sets them: an unproven fault never acts unconfirmed

    @property
    def reason(self) -> str:
        """Return the diagnosis and the remarks of rules."""
        return "; ".join((self.diagnosis.reason, *self.notes, *self._node_remarks()))

    def _node_remarks(self) -> Iterator[str]:
        """Yield which nodes get no ranks because a GPU reset is recommended, and which do by a person's decision."""
        needs_reset = self._needs_reset()
        for node in in_order(self.kept | {fault.node for fault in needs_reset if fault.node}, self.members):
            kinds = dict.fromkeys(fault.kind for fault in needs_reset if fault.node == node)
            if node in self.kept:
                yield f"a person keeps {node} in service"
            if kinds:
                yield f"{', '.join(kinds)} needs a GPU reset, which Holdfast does not do: no rank is started on {node} again"

    @property
    def is_correlated(self) -> bool:
        """Return whether the root fault is correlated across nodes, so that no node is at fault."""
        return self.diagnosis.root.kind in self.correlated

    def against_nodes(self) -> tuple[Fault, ...]:
        """Return the faults attributed to the node that they were seen on."""
        against = (fault for fault in self.diagnosis.against_nodes() if fault.node and fault.kind not in self.correlated)
        return tuple(fault for fault in against if fault.node not in self.kept)

    @property
    def announced(self) -> frozenset[str]:
        """Nodes that are being removed anyway, which needs no approval."""
        seen = (self.diagnosis.root, *self.diagnosis.secondary_failures)
        return frozenset(fault.node for fault in seen if fault.kind == NODE_LEAVING.id and fault.node)

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes that cannot have ranks now: lost ones, and those that a fault removes, whether it is the root cause or not.

        Holdfast does not reset GPUs, so a node whose ranks were stopped by a fault that needs a reset is removed: the same error would
        stop them again. Other nodes are removed only while spares can replace them: those whose ranks continued through such a fault,
        those to be drained if that is the root cause (all of them at once if there are spares for all), and those with a recurring fault.
        """
        against, root = self.against_nodes(), self.diagnosis.root
        evicted = {fault.node for fault in against if self.recommended_actions.of(fault) is RecommendedAction.EVICT}
        surely = self.lost | {node for node in evicted | {fault.node for fault in self._needs_reset()} if node}
        drained = [fault for fault in against if self.recommended_actions.of(fault) is RecommendedAction.DRAIN]
        idle = {fault.node for fault in drained if fault is root}
        reset = {fault.node for fault in against if self._is_reset(fault)}
        while_spares = surely | self.worn | {node for node in reset | idle if node}
        together = while_spares | {fault.node for fault in drained if fault.node and idle}
        fits = (one for one in (together, while_spares) if sum(node in self.members for node in one) <= len(self.spares))
        return next(fits, surely)

    def _needs_reset(self) -> list[Fault]:
        """Return the faults that stopped ranks and need a GPU reset."""
        return [one for one in self.against_nodes() if self._is_reset(one) and (one is self.diagnosis.root or one.rank is not None)]

    def _is_reset(self, fault: Fault) -> bool:
        return self.recommended_actions.of(fault) is RecommendedAction.RESET_GPU and fault.entry.attributed_to in HARDWARE_OF_NODE

    @property
    def unfit(self) -> tuple[str, ...]:
        """Members that cannot have ranks now."""
        return in_order(self.leaving, self.members)

    @property
    def bad(self) -> tuple[str, ...]:
        """Members to drop by any action beyond a restart of the workers: the unfit ones, or else the node of the root fault."""
        own = None if self.is_correlated else self.diagnosis.root.node
        return self.unfit or in_order(frozenset([own] if own else []), self.members)

    @property
    def rank_map(self) -> RankMap:
        """Return `ranks` with the node of each rank: itself if it is one already, as for a job that is simulated."""
        return self.ranks if isinstance(self.ranks, RankMap) else RankMap(self.ranks)

    def failed(self, action: RecoveryAction) -> bool:
        """Return whether *action* failed in this incident; if nodes were lost since then, it may be tried again."""
        return action in self.tried and not self.lost

    def recent(self) -> list[PastRecovery]:
        """Return the recoveries within the budget's window."""
        return [one for one in self.past if self.now - one.at < self.budget.recovery_window]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, with the reason that log, history, UI and CLI show unchanged."""

    action: RecoveryAction
    reason: str
    drop: tuple[str, ...] = ()
    """Members to remove."""
    add: tuple[str, ...] = ()
    """Spares that replace them."""
    need: int = 0
    """Nodes to wait for."""
    seats: tuple[Placement, ...] = ()
    """New places of the replaced ranks; all others stay in their processes."""
    vacate: tuple[int, ...] = ()
    """Ranks that are dropped."""
    rotate: bool = False
    """Move every rank to another node, to tell a failure that follows the rank from one that stays on the node."""
    before: int = 0
    """Restore a state before this step, as later ones are corrupt; 0: restore the newest."""
    skip: tuple[int, ...] = ()
    """Steps whose batches are skipped."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The rule does not apply, with the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Noted:
    """The rule does not decide, but adds a remark for the rules after it."""

    why: str
    case: Case
    """The case with the remark."""


Rule = Callable[[Case], Decision | Pass | Noted]
