"""The phases of a recovery in order, and the T that each counts towards (T = T0 + T1 + T2 + T3 + T4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.history.models import Phase
from holdfast.policies.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseKind:
    """A kind of phase: its recorded *name*, its *term* in T = T0 + T1 + T2 + T3 + T4, what happens in it, and what it is called."""

    name: str
    term: str
    meaning: str
    called: str = ""
    """What readers know it by, if that is not its name."""

    @property
    def label(self) -> str:
        """Return what every view calls it: ``T4 warm-up and compile``."""
        return f"{self.term} {self.called or self.name}".strip()


KINDS: Final = (
    PhaseKind(name="detect", term="", meaning="from the fault until the controller knows of it"),
    PhaseKind(name="diagnose", term="", meaning="find the root cause and choose the action"),
    PhaseKind(name="isolate", term="", meaning="stop ranks, take unhealthy nodes out"),
    PhaseKind(name="failed attempt", term="", meaning="an action that did not bring the job back"),
    PhaseKind(name="wait", term="", meaning="wait for nodes or for an approval"),
    PhaseKind(name="reschedule", term="T1", meaning="place and start ranks, or activate hot spares"),
    PhaseKind(name="communication", term="T2", meaning="form the process groups"),
    PhaseKind(name="load", term="T3", meaning="load the state"),
    PhaseKind(name="warm-up", term="T4", meaning="compile and run the first step", called="warm-up and compile"),
    PhaseKind(name="rollback", term="T0", meaning="steps that are computed a second time"),
)
RESUME: Final = PhaseKind(name="resume", term="T2-T4", meaning="form the process groups, load the state, compile and run the first step")
"""T2, T3 and T4 together, while they run: how they share the time is known when all ranks have made their first step."""
PHASE_OF_STATE: Final[Mapping[str, str]] = {
    State.DIAGNOSING: "diagnose",
    State.DECIDING: "diagnose",
    State.ISOLATING: "isolate",
    State.RESCHEDULING: "reschedule",
    State.WAITING: "wait",
    State.RESUMING: RESUME.name,
}
"""The phase that runs in each state of a job; before the first of them it is detected."""
_BY_NAME: Final = {kind.name: kind for kind in (*KINDS, RESUME)}
OTHER: Final = PhaseKind(name="other", term="", meaning="a phase that this version does not know")
ROLLBACK: Final = "rollback"
SUM: Final = " + ".join(sorted(kind.term for kind in KINDS if kind.term))
"""The terms of recovery time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePart:
    """One phase of one recovery: its *kind*, the *label* to show, its *seconds* and its *share* of all phases."""

    kind: PhaseKind
    label: str
    seconds: float
    share: float


def kind_of(name: str) -> PhaseKind:
    """Return the kind of the phase that is recorded as *name*."""
    return _BY_NAME.get(name, OTHER)


def label_of(name: str) -> str:
    """Return what every view calls the phase *name*; an unknown one keeps its name."""
    kind = kind_of(name)
    return name if kind is OTHER else kind.label


def parts(phases: Sequence[Phase]) -> tuple[PhasePart, ...]:
    """Return the phases of one recovery in order, each with its share of their sum."""
    ordered = sorted(phases, key=lambda phase: phase.position)
    total = sum(max(0.0, phase.seconds) for phase in ordered) or 1.0
    found = []
    for phase in ordered:
        kind, seconds = kind_of(phase.name), max(0.0, phase.seconds)
        found.append(PhasePart(kind=kind, label=label_of(phase.name), seconds=seconds, share=seconds / total))
    return tuple(found)
