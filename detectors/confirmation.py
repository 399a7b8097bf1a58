"""Which faults that one log line does not prove are confirmed by a second, independent signal.

A line such as ``Link is down`` may be written on a healthy node: the port is unused, a cable was moved, a driver restarts a queue. It is
shown, and it takes a node out only once something else on that node shows the same fault, or what follows from it and from nothing else
that is known: a measured value, a lost peer, a hang, a failed write, a line in another log. That a worker ended is none of it: workers
end for any reason. What follows from what is in `associations.toml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from holdfast.detectors.associations import Association, Scope, belongs, between, is_secondary
from holdfast.detectors.catalogue import KERNEL_LOG, TAKES_NODE_OUT, WORKER_OUTPUT, Area, Fault, FaultKey, FaultKind, RecommendedActions
from holdfast.detectors.causes import explained
from holdfast.detectors.evidence import LogLine
from holdfast.detectors.log_lines.heuristics import OTHERS
from holdfast.detectors.log_lines.tables import header_of

SURELY: Final = 0.5
"""How strongly one of the two signals has to explain the other, 0 to 1."""
NEAR: Final = 120.0
"""Seconds that may lie between the two."""
LASTING: Final = 86400.0
"""Seconds from which on a rule is about a condition that lasts (a driver that does not match): then they may lie further apart."""
MOST: Final = 256
"""Maximum number of signals to compare with an unproven fault: the faults of ten thousand ranks are not compared pairwise."""

BY_POLICY: Final = "the policy sets its action"
CONFIRMED_BY: Final = "confirmed by "
CONTRADICTED_BY: Final = "the node's kernel contradicts the line: "
AGREES: Final = "; measured: "
UNUSED: Final = "no rank of the job uses that device"
"""Reasons why a fault acts, or does not."""


class ActsOn(StrEnum):
    """What suffices to take a node out because of a kind of fault."""

    MEASURED = "measured"
    """A value that was measured."""
    LINE = "line"
    """One line of a log that proves it."""
    SECOND_SIGNAL = "second-signal"
    """A line of a log, with a second, independent signal."""
    NEVER = "never"
    """Nothing: the kind takes no node out."""


def acts_on(kind: FaultKind) -> tuple[ActsOn, ...]:
    """Return what suffices to take a node out because of *kind*; a kind that is measured may stand in logs too."""
    if kind.recommended_action not in TAKES_NODE_OUT:
        return (ActsOn.NEVER,)
    measured = () if isinstance(kind.unhealthy.evidence, LogLine) else (ActsOn.MEASURED,)
    logged = (ActsOn.LINE if kind.certain else ActsOn.SECOND_SIGNAL,) if kind.logs else ()
    return measured + logged


def acts_alone(kind: FaultKind, text: str) -> bool:
    """Return whether *text*, in a log whose writer can know of *kind*, takes a node out by itself."""
    return kind.recommended_action in TAKES_NODE_OUT and kind.proves(text)


def confirmed(faults: Sequence[Fault]) -> dict[FaultKey, str]:
    """Return those of *faults* that need proof and get it from others, by their keys, each with the signal that confirms it."""
    unproven = [fault for fault in faults if fault.needs_proof and not fault.is_ruled_out and fault.log in fault.entry.logs]
    found: dict[FaultKey, str] = {}
    for fault in unproven:
        if fault.key not in found and (signal := _signal(fault, faults)) is not None:
            found[fault.key] = f"{signal.kind} ({signal.source})" if signal.source else signal.kind
    return found


def _signal(fault: Fault, faults: Sequence[Fault]) -> Fault | None:
    """Return the first fault beside *fault*, on its node, that confirms it and that nothing else explains."""
    beside = [other for other in faults if other is not fault and other.node == fault.node and other.node is not None][:MOST]
    others = [one for one in faults if not one.needs_proof and one.kind not in OTHERS and not is_secondary(one.kind)][:MOST]
    return next((other for other in beside if _confirms(other, fault) and not _has_cause(other, others)), None)


def _confirms(other: Fault, fault: Fault) -> bool:
    """Return whether *other* is independent of *fault* and shows the same, or what follows from it or leads to it, at about that time."""
    if other.is_ruled_out or other.kind in OTHERS or not _is_independent(other, fault):
        return False
    if not other.is_proven and header_of(other.quote):
        return False  # a table that somebody printed does not say since when it counts
    if other.kind == fault.kind:
        return True
    rules = confirming_rules(fault.entry, other.kind)
    if not rules or max(explained(fault, other), explained(other, fault)) < SURELY:
        return False
    return any(rule.after >= LASTING for rule in rules) or abs(other.at - fault.at) <= NEAR


def confirming_rules(kind: FaultKind, other: str) -> list[Association]:
    """Return the rules by which a fault of kind *other* on the same node may confirm one of *kind*.

    They are about that node: what is felt anywhere (a lost peer, a hang) tells of a link, and not of a disk.
    """
    if belongs(other, "worker-end"):
        return []
    felt_anywhere = kind.area is Area.NETWORK or kind.component == "network file system"
    return [
        rule
        for rule in (*between(kind.id, other), *between(other, kind.id))
        if rule.strength >= SURELY and (felt_anywhere or rule.scope not in {Scope.ANYWHERE, Scope.ELSEWHERE})
    ]


def _has_cause(symptom: Fault, others: Iterable[Fault]) -> bool:
    """Return whether another fault explains *symptom*: a peer that is lost because a rank was killed says nothing of a link."""
    return any(cause is not symptom and explained(cause, symptom) >= SURELY for cause in others)


def _is_independent(other: Fault, fault: Fault) -> bool:
    """Return whether *other* is proven or from another log; what a rank prints and its own exit are one signal."""
    if fault.log == WORKER_OUTPUT and other.rank is not None and other.rank == fault.rank:
        return False
    return other.is_proven or _written_in(other) != _written_in(fault)


def _written_in(fault: Fault) -> str:
    """Return the log that *fault* is from: what a monitor of the node reports is from the kernel log that it reads, or from DCGM."""
    return KERNEL_LOG if fault.is_condition or fault.is_dcgm else fault.log


def why_it_acts(fault: Fault, recommended_actions: RecommendedActions) -> str:
    """Return what proves *fault*, or why it is only shown; empty where its kind takes no node out."""
    if fault.entry.recommended_action not in TAKES_NODE_OUT:
        return ""
    if fault.kind in recommended_actions.changed:
        return BY_POLICY
    if fault.is_proven:
        return f"the {_evidence(fault)} proves it" if fault.log else "measured"
    measured = f"{AGREES}{fault.supported}" if fault.supported else ""
    if not fault.is_ruled_out and (signal := recommended_actions.confirmed.get(fault.key)) is not None:
        return f"{CONFIRMED_BY}{signal}{measured}"
    return f"no: {_why_not(fault)}{measured}"


def _why_not(fault: Fault) -> str:
    if fault.idle:
        return UNUSED
    if fault.contradicted:
        return f"{CONTRADICTED_BY}{fault.contradicted}"
    if fault.log not in fault.entry.logs:
        return "what writes to that log cannot know of it"
    return f"one {_evidence(fault)} does not prove it, and nothing else on the node shows it"


def _evidence(fault: Fault) -> str:
    return "number" if fault.is_driver_event else "event" if fault.is_event else "condition" if fault.is_condition else "line"
