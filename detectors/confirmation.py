"""Which faults that one log line does not prove are confirmed by a second, independent signal.

A line such as ``Link is down`` may be written on a healthy node: the port is unused, a cable was moved, a driver restarts a queue. It is
shown, and it takes a node out only once something else on that node shows the same fault, or what follows from it: a measured value, the
end or the hang of a rank, a line in another log. What follows from what is in `associations.toml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from holdfast.detectors.catalogue import TAKES_NODE_OUT, WORKER_OUTPUT, Fault, FaultKey, FaultKind, RecommendedActions
from holdfast.detectors.causes import explained
from holdfast.detectors.evidence import LogLine
from holdfast.detectors.log_lines.heuristics import OTHERS

SURELY: Final = 0.5
"""How strongly one of the two signals has to explain the other, 0 to 1."""
MOST: Final = 256
"""Maximum number of signals to compare with an unproven fault: the faults of ten thousand ranks are not compared pairwise."""


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


def is_unproven(fault: Fault) -> bool:
    """Return whether *fault* takes a node out once it is confirmed, and is not proven by itself."""
    return fault.entry.recommended_action in TAKES_NODE_OUT and not fault.is_proven


def confirmed(faults: Sequence[Fault]) -> dict[FaultKey, str]:
    """Return the unproven ones of *faults* that others confirm, by their keys, each with the signal that confirms it."""
    unproven = [fault for fault in faults if is_unproven(fault) and fault.log in fault.entry.logs]
    found: dict[FaultKey, str] = {}
    for fault in unproven:
        if fault.key in found:
            continue
        signal = next((other for other in _beside(fault, faults) if _confirms(other, fault)), None)
        if signal is not None:
            found[fault.key] = f"{signal.kind} ({signal.source})" if signal.source else signal.kind
    return found


def _beside(fault: Fault, faults: Iterable[Fault]) -> list[Fault]:
    """Return the other faults on the same node, at most `MOST`."""
    return [other for other in faults if other is not fault and other.node == fault.node and other.node is not None][:MOST]


def _confirms(other: Fault, fault: Fault) -> bool:
    if other.kind in OTHERS or not _is_independent(other, fault):
        return False
    return other.kind == fault.kind or max(explained(fault, other), explained(other, fault)) >= SURELY


def _is_independent(other: Fault, fault: Fault) -> bool:
    """Return whether *other* is measured or from another log; what a rank prints and its own exit are one signal."""
    if fault.log == WORKER_OUTPUT and other.rank is not None and other.rank == fault.rank:
        return False
    return other.log != fault.log


def why_it_acts(fault: Fault, recommended_actions: RecommendedActions) -> str:
    """Return what proves *fault*, or why it is only shown; empty where its kind takes no node out."""
    if fault.entry.recommended_action not in TAKES_NODE_OUT:
        return ""
    if fault.kind in recommended_actions.changed:
        return "the policy sets its action"
    if fault.is_proven:
        return "the line proves it" if fault.log else "measured"
    if (signal := recommended_actions.confirmed.get(fault.key)) is not None:
        return f"confirmed by {signal}"
    if fault.log not in fault.entry.logs:
        return "no: what writes to that log cannot know of it"
    return "no: one line does not prove it, and nothing else on the node shows it"
