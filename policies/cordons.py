"""A node out of service: what is held against it, by whom, and how much a program may hold. Values only; `quarantine` has the acts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from policies.node_states import IN_SERVICE, NodeEvent, NodeState


class CordonKind(StrEnum):
    """What a hold is."""

    DOUBT = "doubt"
    """It leaves the node in service."""
    QUARANTINE = "quarantine"
    UNTESTED = "untested"
    """It stands where a person's hold ran out: a burn-in has to be passed."""
    PERSON = "person"
    RETIREMENT = "retirement"


TESTABLE: Final = frozenset({CordonKind.QUARANTINE, CordonKind.UNTESTED})
PROGRAMS: Final = frozenset({CordonKind.DOUBT, CordonKind.QUARANTINE, CordonKind.UNTESTED, CordonKind.RETIREMENT})
"""Kinds that a person's word to take the node back answers; that of another person is not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who acts: a program under its name, or a person."""

    name: str
    person: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonedFault:
    """A fault that a node is held for."""

    kind: str
    """Of the catalogue."""
    device: str = ""
    """The device that had it, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """One reason why a node is not, or not gladly, given to jobs."""

    number: int
    """Of this node: holds and burn-ins are counted together, and no number is given twice."""
    kind: CordonKind
    owner: Owner
    reason: str
    evidence: tuple[str, ...] = ()
    faults: tuple[CordonedFault, ...] = ()
    """What a burn-in has to exercise before it lifts this hold (`policies.required_checks`)."""
    at: float
    until: float | None = None
    """A doubt ends then, a person's hold becomes one that a burn-in lifts, and for a quarantine a burn-in is due; empty: never."""
    drains: bool = False
    """A person's hold that asks jobs to leave the node, too; else who trains there goes on there."""
    leave_by: float | None = None
    """When they have to be gone (seconds since 1970); empty: as soon as that interrupts nobody."""
    test: int = 0
    """Number of the burn-in that runs for it; 0: none."""
    test_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node and all that is held against it."""

    name: str
    state: NodeState = NodeState.HEALTHY
    since: float = 0.0
    """When it moved last."""
    back: float = 0.0
    """When it last came back to `healthy`: evidence from before that is out of date."""
    moves: int = 0
    """Moves that it ever made."""
    number: int = 0
    """The greatest number given to a hold or a burn-in."""
    holds: tuple[Cordon, ...] = ()
    """Those that are open."""
    doubts: tuple[float, ...] = ()
    """When it was doubted."""
    quarantines: tuple[float, ...] = ()
    """When it was quarantined."""
    failures: tuple[float, ...] = ()
    """When it failed a burn-in."""
    pardoned: float = 0.0
    """When it was last taken back from retirement: what came before is not counted any more."""

    def of_kind(self, *kinds: CordonKind) -> tuple[Cordon, ...]:
        """Return its open holds of these *kinds*."""
        return tuple(one for one in self.holds if one.kind in kinds)

    @property
    def drain(self) -> Cordon | None:
        """Return the hold by which jobs are to leave it: of several the one that asks for it first; none where they may stay."""
        asked = [one for one in self.holds if one.drains]
        return min(asked, key=lambda one: math.inf if one.leave_by is None else one.leave_by, default=None)

    @property
    def is_isolated(self) -> bool:
        """Tell whether no job may be given it."""
        return self.state not in IN_SERVICE

    def is_due(self, now: float) -> bool:
        """Tell whether a burn-in should be run on it."""
        open_ones = self.of_kind(*TESTABLE)
        return self.state is NodeState.QUARANTINED and any(one.until is not None and one.until <= now for one in open_ones)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How much it takes: counts, shares and seconds."""

    share: float = 0.25
    """Of the cluster's nodes that may be isolated before a program may isolate no further one; one node always may."""
    doubts: int = 3
    """Doubts within `doubt_window` that quarantine a node; 0: they never do."""
    doubt_window: float = 86_400.0
    """Also how long a doubt lasts."""
    cool: float = 3_600.0
    """After a first quarantine so long a burn-in is due, after each further one within `window` twice as long as before; so after failed
    burn-ins."""
    retire: int = 4
    """Quarantines within `window` of which the last one retires the node; 0: none does."""
    failures: int = 5
    """Failed burn-ins within `window` of which the last one retires the node; 0: none does."""
    window: float = 30 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineLimits:
    """The cluster around a node."""

    size: int
    isolated: int
    """Nodes that are isolated, the node in question aside."""
    rules: Rules = Rules()

    @property
    def most(self) -> int:
        """Return how many nodes may be isolated before a person has to be asked."""
        return max(1, math.floor(self.rules.share * self.size + 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTransition:
    """One move of a node, with who made it and why."""

    at: float
    before: NodeState
    event: NodeEvent
    after: NodeState
    owner: Owner
    reason: str
    hold: int
    """The number of the hold that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInAttempt:
    """One burn-in: what it was begun for, and its own number."""

    hold: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonChanged:
    """It was done."""

    node: Node
    moves: tuple[NodeTransition, ...] = ()
    """At most one: a hold beside another one moves nothing."""
    owner: Owner
    reason: str
    at: float
    hold: int
    """The number of the hold that was opened, changed or closed."""
    test: int = 0
    """The number of the burn-in that was begun."""

    @property
    def burn_in(self) -> BurnInAttempt:
        """Return what the outcome of the burn-in has to name."""
        return BurnInAttempt(hold=self.hold, number=self.test)


@dataclass(frozen=True, slots=True)
class OutOfDate:
    """It is out of date and changed nothing."""

    why: str


@dataclass(frozen=True, slots=True)
class TransitionRefused:
    """It cannot be done as the node is; with the cure."""

    why: str


@dataclass(frozen=True, slots=True)
class NeedsPerson:
    """It would isolate more of the cluster than a program may: a person has to say so."""

    why: str


Answer = CordonChanged | OutOfDate | TransitionRefused | NeedsPerson


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRequest:
    """What somebody says of a node: who, why, when, and by what evidence."""

    owner: Owner
    reason: str
    at: float
    """When it is said."""
    seen: float | None = None
    """When its evidence was seen; empty: when it is said."""
    evidence: tuple[str, ...] = field(default=())
    faults: tuple[CordonedFault, ...] = field(default=())
    """The faults that the evidence is of."""
    approved: str = ""
    """The person who said that a program may isolate the node, though more of the cluster is out than programs may take out."""

    @property
    def evident(self) -> float:
        """Return the time that the evidence is of."""
        return self.at if self.seen is None else self.seen


def state_of(holds: Iterable[Cordon]) -> NodeState:
    """Return the state that *holds* put a node in: the strongest decides."""
    holds = tuple(holds)
    kinds = {one.kind for one in holds}
    if CordonKind.RETIREMENT in kinds:
        return NodeState.RETIRED
    if CordonKind.PERSON in kinds:
        return NodeState.HELD
    if kinds & TESTABLE:
        return NodeState.IN_BURN_IN if any(one.test for one in holds) else NodeState.QUARANTINED
    return NodeState.SUSPECT if kinds else NodeState.HEALTHY


def describe(node: Node) -> str:
    """Say why no job may be given *node*, and what brings it back; empty when jobs may."""
    if not node.is_isolated:
        return ""
    kinds = {NodeState.RETIRED: (CordonKind.RETIREMENT,), NodeState.HELD: (CordonKind.PERSON,)}.get(node.state, tuple(TESTABLE))
    one = node.of_kind(*kinds)[-1]
    verb = "release" if node.state is NodeState.HELD else "readmit"
    cure = f"`holdfast nodes {verb} {node.name} --reason ...`"
    return f"{node.state} by {one.owner.name} (hold {one.number}): {one.reason}; {cure} takes it back"
