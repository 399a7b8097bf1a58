"""From all evidence of an incident to one verdict: the root over its echoes, the user's code when a failure follows the step.

Rules: a node's loss beats what it caused on other nodes; a kill or a stop beats the connection errors of the survivors; among equals the
first seen is the root; the same failure at the same step on another node is the user's code, whatever node it met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from detectors.catalogue import CATALOGUE, Blame, Fault, FaultKind, Level, kind
from detectors.checkpoint import see_trouble
from detectors.evidence import (
    AgentSilence,
    CheckpointTrouble,
    Evidence,
    HangLimits,
    Overrun,
    Progress,
    Raised,
    Sample,
    StartTrouble,
    WorkerExit,
    WorkerStop,
)
from detectors.node import see_silence
from detectors.process import DISK_FULL, EXCEPTION, EXIT_CODE, EXIT_EARLY, GPU_MEMORY, PEER_LOST, see_exit, see_start, see_stop
from detectors.progress import see_overrun, see_progress

_BROKEN = Raised(type="ValueError", message="bad shape", traceback='File "train.py", line 3, in <module>')

USER_ERROR: Final = kind(
    FaultKind(
        id="user-error",
        title="The script fails the same way at the same step wherever it runs",
        component="user code",
        source="diagnosis",
        level=Level.USER_ERROR,
        blame=Blame.USER_CODE,
        action="mend the script: the traceback of the first failing rank is in the incident; running the job again will not help",
        reference="docs/architecture.md",
        sick=Sample(
            evidence=(
                WorkerExit(node="n0", rank=0, at=0.0, code=1, step=7, raised=_BROKEN),
                WorkerExit(node="n1", rank=1, at=0.1, code=1, step=7, raised=_BROKEN),
            )
        ),
        healthy=Sample(
            evidence=(
                WorkerExit(node="n0", rank=0, at=0.0, signal=9, step=7),
                WorkerExit(node="n1", rank=1, at=0.1, signal=9, step=7),
            )
        ),
        weight=99,
    )
)

_FOLLOWS_STEP: Final = frozenset({EXCEPTION.id, EXIT_CODE.id, EXIT_EARLY.id, GPU_MEMORY.id})
"""Kinds that can be the user's code; a signal or a lost node never is."""

LOOKS: Final[dict[type, Callable[[Any, HangLimits], Fault | None]]] = {
    WorkerExit: see_exit,
    WorkerStop: see_stop,
    AgentSilence: see_silence,
    Progress: see_progress,
    CheckpointTrouble: see_trouble,
    StartTrouble: see_start,
    Overrun: see_overrun,
}
"""Which detector reads which evidence: the one place where a new kind of evidence is entered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A failure of this job that was answered earlier, as far as the diagnosis needs it."""

    node: str | None
    step: int | None
    signature: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdict on one incident: the *root* fault, what followed from it, and why this one is the root."""

    root: Fault
    echoes: tuple[Fault, ...]
    because: str


def see(evidence: Iterable[Evidence], limits: HangLimits) -> list[Fault]:
    """Return the faults in *evidence*, in its order."""
    found = (LOOKS[type(item)](item, limits) for item in evidence)
    return [fault for fault in found if fault is not None]


def seconds_to_settle(faults: Iterable[Fault], members: int) -> float:
    """Return how many seconds to wait for more evidence before the verdict.

    Nothing for a root that speaks for itself; a third of a second for a failure that other nodes may share; longer when all that
    is known are echoes, because something must have caused them.
    """
    acting = [fault for fault in faults if fault.entry.level not in (Level.RECORD, Level.WATCH)]
    if not acting:
        return 0.0
    if all(fault.kind == PEER_LOST.id for fault in acting):
        return 3.0
    best = max(acting, key=lambda fault: fault.entry.weight)
    if best.kind in _FOLLOWS_STEP | {DISK_FULL.id}:
        told = {fault.node for fault in acting}
        return 0.0 if len(told) >= members else 0.3
    return 0.0


def _shared(faults: list[Fault], past: tuple[Before, ...], members: int) -> tuple[Fault, str] | None:
    """Return the failure that follows the step and not the node, with the reason, if there is one."""
    for fault in sorted(faults, key=lambda fault: fault.at):
        if fault.kind not in _FOLLOWS_STEP:
            continue
        twins = sorted({f.node for f in faults if (f.signature, f.step) == (fault.signature, fault.step) and f.node})
        if len(twins) > 1:
            return fault, f"the same failure ({fault.signature}) at step {fault.step} on nodes {', '.join(twins)} at once"
        for old in past:
            if (old.signature, old.step) != (fault.signature, fault.step):
                continue
            if old.node != fault.node:
                return fault, f"the same failure ({fault.signature}) at step {fault.step} first on {old.node}, now on {fault.node}"
            if members == 1:
                return fault, f"the same failure ({fault.signature}) at step {fault.step} again after a restart; there is no other node to compare"
    return None


def diagnose(faults: list[Fault], past: tuple[Before, ...] = (), members: int = 2) -> Diagnosis:
    """Return the verdict on *faults* (at least one), knowing the *past* failures of the job and how many nodes hold ranks."""
    shared = _shared(faults, past, members)
    strongest = max(faults, key=lambda fault: (fault.entry.weight, -fault.at))
    if shared and strongest.entry.weight <= CATALOGUE[shared[0].kind].weight:
        first, why = shared
        root = Fault(
            kind=USER_ERROR.id,
            at=first.at,
            node=first.node,
            rank=first.rank,
            step=first.step,
            quote=first.quote,
            signature=first.signature,
            detail=first.detail,
        )
        return Diagnosis(root=root, echoes=tuple(faults), because=f"{first.quote}: {why}, so the script and not a node is at fault")
    echoes = tuple(fault for fault in faults if fault is not strongest)
    because = f"{strongest.kind} of {strongest.subject}: {strongest.quote}"
    if echoes:
        because += f"; {len(echoes)} other symptom(s) follow from it"
    return Diagnosis(root=strongest, echoes=echoes, because=because)
