"""Values for nodes out of service: cordons with owner and reason, quarantine rules and limits. `quarantine` has the operations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from holdfast.policies.nodes.node_states import IN_SERVICE, NodeEvent, NodeState


class CordonKind(StrEnum):
    """Kind of a cordon."""

    SUSPICION = "suspicion"
    """The node stays in service and is suspect."""
    QUARANTINE = "quarantine"
    UNTESTED = "untested"
    """A person's cordon expired: a burn-in must pass."""
    PERSON = "person"
    DECOMMISSION = "decommission"


TESTABLE: Final = frozenset({CordonKind.QUARANTINE, CordonKind.UNTESTED})
PROGRAMS: Final = frozenset({CordonKind.SUSPICION, CordonKind.QUARANTINE, CordonKind.UNTESTED, CordonKind.DECOMMISSION})
"""Kinds that `holdfast node return` lifts; the cordon of another person is not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Owner of a cordon: a program or a person."""

    name: str
    person: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonedFault:
    """A fault that a node is cordoned for."""

    kind: str
    """Fault kind."""
    device: str = ""
    """The faulty device, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """One reason to keep jobs off a node, or to prefer other nodes."""

    number: int
    """Unique per node; cordons and burn-ins share the sequence."""
    kind: CordonKind
    owner: Owner
    reason: str
    evidence: tuple[str, ...] = ()
    faults: tuple[CordonedFault, ...] = ()
    """Faults whose parts a burn-in must exercise to lift this cordon (`holdfast.policies.nodes.required_checks`)."""
    at: float
    until: float | None = None
    """End of a suspicion or of a person's cordon, which a burn-in lifts then; when a quarantined node is due for a burn-in. None: never."""
    drains: bool = False
    """A person's cordon that also drains the node; otherwise jobs on it continue."""
    leave_by: float | None = None
    """Deadline of the drain (Unix time); None: as soon as it does not interrupt training."""
    test: int = 0
    """Number of the running burn-in; 0: none."""
    test_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node with its cordons and its past."""

    name: str
    state: NodeState = NodeState.HEALTHY
    since: float = 0.0
    """Time of the last state change."""
    back: float = 0.0
    """When it last became `healthy`: earlier evidence is out of date."""
    transitions: int = 0
    """Number of state changes."""
    number: int = 0
    """The highest number of a cordon or a burn-in."""
    cordons: tuple[Cordon, ...] = ()
    """Open cordons."""
    suspicions: tuple[float, ...] = ()
    """When it became suspect."""
    quarantines: tuple[float, ...] = ()
    """When it was quarantined."""
    failures: tuple[float, ...] = ()
    """When it failed a burn-in."""
    pardoned: float = 0.0
    """When it last returned to service from being decommissioned: earlier quarantines and failures do not count."""

    def of_kind(self, *kinds: CordonKind) -> tuple[Cordon, ...]:
        """Return the open cordons of these *kinds*."""
        return tuple(one for one in self.cordons if one.kind in kinds)

    @property
    def drain(self) -> Cordon | None:
        """Return the cordon that drains the node; of several the one with the earliest deadline."""
        asked = [one for one in self.cordons if one.drains]
        return min(asked, key=lambda one: math.inf if one.leave_by is None else one.leave_by, default=None)

    @property
    def is_isolated(self) -> bool:
        """Return whether no job may use it."""
        return self.state not in IN_SERVICE

    def is_due(self, now: float) -> bool:
        """Return whether it is due for a burn-in."""
        open_ones = self.of_kind(*TESTABLE)
        return self.state is NodeState.QUARANTINED and any(one.until is not None and one.until <= now for one in open_ones)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of the quarantine: counts, shares and seconds."""

    max_unavailable: float = 0.25
    """Share of the cluster's nodes that programs may isolate; at least one node."""
    suspicions: int = 3
    """Suspicions within `suspicion_window` that quarantine a node; 0: never."""
    suspicion_window: float = 86_400.0
    """Also the duration of a suspicion."""
    cool: float = 3_600.0
    """Time from a first quarantine to its burn-in; doubled for each further one within `window`, and for each failed burn-in."""
    decommission_after: int = 4
    """Quarantines within `window` that decommission the node; 0: never."""
    failures: int = 5
    """Failed burn-ins within `window` that decommission the node; 0: never."""
    window: float = 30 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineLimits:
    """How much of a cluster may be isolated."""

    size: int
    isolated: int
    """Isolated nodes, without the node in question."""
    rules: Rules = Rules()

    @property
    def most(self) -> int:
        """Return the number of nodes that programs may isolate without approval."""
        return max(1, math.floor(self.rules.max_unavailable * self.size + 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTransition:
    """A state change of a node, with its owner and reason."""

    at: float
    before: NodeState
    event: NodeEvent
    after: NodeState
    owner: Owner
    reason: str
    cordon: int
    """Number of the cordon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInAttempt:
    """A burn-in: the cordon that it may lift, and its own number."""

    cordon: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonChanged:
    """The request was carried out."""

    node: Node
    transitions: tuple[NodeTransition, ...] = ()
    """At most one: a further cordon may leave the state as it is."""
    owner: Owner
    reason: str
    at: float
    cordon: int
    """Number of the cordon that was opened, changed or closed."""
    test: int = 0
    """Number of the burn-in that was started."""

    @property
    def burn_in(self) -> BurnInAttempt:
        """Return the identity of the burn-in, which its outcome must name."""
        return BurnInAttempt(cordon=self.cordon, number=self.test)


@dataclass(frozen=True, slots=True)
class OutOfDate:
    """The request is out of date and changed nothing."""

    why: str


@dataclass(frozen=True, slots=True)
class TransitionRefused:
    """The request is not possible in the node's state; with the cure."""

    why: str


@dataclass(frozen=True, slots=True)
class NeedsPerson:
    """The request would isolate more of the cluster than a program may: it needs approval."""

    why: str


Answer = CordonChanged | OutOfDate | TransitionRefused | NeedsPerson


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRequest:
    """A request about a node: who, why, when, and with what evidence."""

    owner: Owner
    reason: str
    at: float
    """Time of the request."""
    seen: float | None = None
    """When the evidence was seen; None: at the time of the request."""
    evidence: tuple[str, ...] = field(default=())
    faults: tuple[CordonedFault, ...] = field(default=())
    """Faults of the evidence."""
    approved: str = ""
    """The person who approved that a program isolates the node beyond its limit."""

    @property
    def evident(self) -> float:
        """Return the time of the evidence."""
        return self.at if self.seen is None else self.seen


def state_of(cordons: Iterable[Cordon]) -> NodeState:
    """Return the state that results from *cordons*: the strongest one decides."""
    cordons = tuple(cordons)
    kinds = {one.kind for one in cordons}
    if CordonKind.DECOMMISSION in kinds:
        return NodeState.DECOMMISSIONED
    if CordonKind.PERSON in kinds:
        return NodeState.CORDONED
    if kinds & TESTABLE:
        return NodeState.IN_BURN_IN if any(one.test for one in cordons) else NodeState.QUARANTINED
    return NodeState.SUSPECT if kinds else NodeState.HEALTHY


def describe(node: Node) -> str:
    """Return why no job may use *node*, and what returns it to service; empty if jobs may."""
    if not node.is_isolated:
        return ""
    kinds = {NodeState.DECOMMISSIONED: (CordonKind.DECOMMISSION,), NodeState.CORDONED: (CordonKind.PERSON,)}.get(
        node.state, tuple(TESTABLE)
    )
    one = node.of_kind(*kinds)[-1]
    verb = "uncordon" if node.state is NodeState.CORDONED else "return"
    cure = f"`holdfast node {verb} {node.name} --reason ...`"
    return f"{node.state} by {one.owner.name} (cordon {one.number}): {one.reason}; {cure} returns it to service"
