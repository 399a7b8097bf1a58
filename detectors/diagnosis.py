"""From all evidence of an incident to one verdict: the root over its echoes, the user's code when a failure follows the step.

Rules: a node's loss beats what it caused on other nodes; a kill or a stop beats the connection errors of the survivors; among equals the
first seen is the root; a root that fails the same way at the same step on another node is the user's code, whatever node it met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from detectors.catalogue import Blame, Fault, FaultKind, Level, kind
from detectors.checkpoint import see_trouble
from detectors.evidence import (
    AgentSilence,
    CheckpointTrouble,
    CutShort,
    Evidence,
    GroupTrouble,
    HangLimits,
    MemoryTrouble,
    Overrun,
    Progress,
    Raised,
    Sample,
    StartTrouble,
    TakeOverTrouble,
    WorkerExit,
    WorkerStop,
)
from detectors.exceptions import EXCEPTION, GPU_MEMORY, NETWORK, PEER_LOST
from detectors.gpu_readings import XidEvent
from detectors.groups import GROUP_BROKEN, see_broken, see_take_over
from detectors.health import see_growth, see_reading
from detectors.memory import see_memory
from detectors.node import see_silence
from detectors.process import EXIT_CODE, EXIT_EARLY, NOT_RUNNABLE, see_exit, see_start, see_stop
from detectors.progress import see_cut_short, see_overrun, see_progress
from detectors.readings import Growth, NodeReading, Reading
from detectors.xids import see_xid

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

FOLLOWS_STEP: Final = frozenset({EXCEPTION.id, EXIT_CODE.id, EXIT_EARLY.id, GPU_MEMORY.id})
"""Kinds that can be the user's code; a signal, a lost node, a full disk or a dead service never is."""

_SHARED_OR_CAUSED: Final = FOLLOWS_STEP | {NETWORK.id, NOT_RUNNABLE.id, "worker-sigabrt"}
"""Kinds whose verdict hangs on what the other nodes have to tell."""

ECHOES: Final = frozenset({PEER_LOST.id, GROUP_BROKEN.id})
"""Kinds that tell of a loss, not of its cause."""

_OF_THEIR_OWN: Final = 80
"""From this weight on a fault does not follow from another: two of them are two causes."""

TWINS_SECONDS: Final = 0.3
"""How long a failure waits for its like on other nodes: ranks in step reach the same line within milliseconds."""
CAUSE_SECONDS: Final = 0.5
"""How long echoes from every node wait for their cause: all agents speak, so an end that caused them is on its way."""
SILENCE_SECONDS: Final = 5.0
"""After how long a silent agent is noticed, unless the caller knows better (`limits.agent_silence`)."""

LOOKS: Final[dict[type, Callable[[Any, HangLimits], Fault | list[Fault] | None]]] = {
    WorkerExit: see_exit,
    WorkerStop: see_stop,
    AgentSilence: see_silence,
    Progress: see_progress,
    CheckpointTrouble: see_trouble,
    MemoryTrouble: see_memory,
    StartTrouble: see_start,
    CutShort: see_cut_short,
    Overrun: see_overrun,
    GroupTrouble: see_broken,
    TakeOverTrouble: see_take_over,
    NodeReading: see_reading,
    Growth: see_growth,
    XidEvent: see_xid,
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


def see(evidence: Iterable[Evidence | Reading], limits: HangLimits) -> list[Fault]:
    """Return the faults in *evidence*, in its order."""
    found = (LOOKS[type(item)](item, limits) for item in evidence)
    return [fault for one in found if one is not None for fault in (one if isinstance(one, list) else [one])]


def seconds_to_settle(faults: Iterable[Fault], members: int, *, silence: float = SILENCE_SECONDS) -> float:
    """Return how many seconds to wait for more evidence before the verdict, when *members* nodes hold ranks.

    Nothing for a root that speaks for itself; a moment for a failure that other nodes may share; when all that is known are echoes, as long
    as it takes to notice the node that caused them, *silence* seconds if it says nothing at all.
    """
    acting = [fault for fault in faults if fault.entry.level not in (Level.RECORD, Level.WATCH)]
    if not acting:
        return 0.0
    root = _strongest(acting)
    everybody_spoke = len({fault.node for fault in acting if fault.node}) >= members
    if root.kind == GROUP_BROKEN.id:
        return CAUSE_SECONDS  # who speaks lives; a node that went away without a word is noticed by its silence long before its peers do
    if root.kind == PEER_LOST.id:
        return CAUSE_SECONDS if everybody_spoke else silence + 1.0
    return TWINS_SECONDS if root.kind in _SHARED_OR_CAUSED and not everybody_spoke else 0.0


def diagnose(faults: list[Fault], past: tuple[Before, ...] = (), members: int = 2) -> Diagnosis:
    """Return the verdict on *faults* (at least one), knowing the *past* failures of the job and how many nodes hold ranks."""
    root = _strongest(faults)
    why = _at_once(root, faults, members) or _again(root, past, members)
    if why is None:
        others = tuple(fault for fault in faults if fault is not root)
        return Diagnosis(root=root, echoes=others, because=f"{root.kind} of {root.subject}: {root.quote}" + _beside(others))
    because = f"{root.quote}: {why}, so the script and not a node is at fault"
    return Diagnosis(root=replace(root, kind=USER_ERROR.id), echoes=tuple(faults), because=because)


def _strongest(faults: list[Fault]) -> Fault:
    """Return the fault that explains the others best: the one nearest the root by its kind, and of those the first."""
    return min(faults, key=lambda fault: (-fault.entry.weight, fault.at))


def _beside(others: tuple[Fault, ...]) -> str:
    """Tell what else was seen: causes of their own, and how many symptoms follow."""
    own = [fault for fault in others if fault.entry.weight >= _OF_THEIR_OWN]
    words = "".join(f"; also {fault.kind} of {fault.subject}" for fault in own)
    follow = len(others) - len(own)
    return words + (f"; {follow} other symptom(s) follow from it" if follow else "")


def _at_once(root: Fault, faults: list[Fault], members: int) -> str | None:
    """Say that *root* is seen on several nodes in this incident, if that makes it the script's."""
    twins = {fault.node for fault in faults if fault.node and (fault.signature, fault.step) == (root.signature, root.step)}
    if root.kind == NOT_RUNNABLE.id and len(twins) >= members:
        return f"it cannot be run on any node of the job ({_listed(twins)})"
    if root.kind in FOLLOWS_STEP and len(twins) > 1:
        return f"the same failure ({root.signature}){_at_step(root)} on nodes {_listed(twins)} at once"
    return None


def _again(root: Fault, past: tuple[Before, ...], members: int) -> str | None:
    """Say that *root* came before at the same step on another node (or on the only one), if that makes it the script's.

    Where no step is known, the same line may have failed hours apart for reasons of the node's: then it takes three times.
    """
    twins = [old for old in past if (old.signature, old.step) == (root.signature, root.step)]
    if root.kind not in FOLLOWS_STEP or len(twins) < (1 if root.step is not None else 2):
        return None
    elsewhere = {old.node for old in twins if old.node and old.node != root.node}
    if elsewhere:
        return f"the same failure ({root.signature}){_at_step(root)} first on {_listed(elsewhere)}, now on {root.node}"
    if members == 1:
        return f"the same failure ({root.signature}){_at_step(root)} again after a restart; there is no other node to compare"
    return None


def _at_step(fault: Fault) -> str:
    return f" at step {fault.step}" if fault.step is not None else ""


def _listed(nodes: Iterable[str | None]) -> str:
    return ", ".join(sorted(node for node in nodes if node))
