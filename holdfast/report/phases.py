"""The phases of a recovery, in the order in which they come, and the T that each counts towards (T = T0 + T1 + T2 + T3 + T4)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.history.models import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is known about a phase: its stored *name*, its *term* and what happens in it."""

    name: str
    term: str
    meaning: str


KINDS: Final = (
    Kind(name="detect", term="", meaning="from the fault to the flow knowing of it"),
    Kind(name="diagnose", term="", meaning="which fault is the root, and what to do"),
    Kind(name="isolate", term="", meaning="stop the ranks, take unhealthy nodes out"),
    Kind(name="failed attempt", term="", meaning="a recovery that did not bring the job back"),
    Kind(name="wait", term="", meaning="nothing to do but wait for capacity"),
    Kind(name="reschedule", term="T1", meaning="place and start the ranks"),
    Kind(name="communication", term="T2", meaning="form the process group"),
    Kind(name="load", term="T3", meaning="read the checkpoint back"),
    Kind(name="warm-up", term="T4", meaning="compile, first step"),
    Kind(name="rollback", term="T0", meaning="steps computed a second time"),
)
OTHER: Final = Kind(name="other", term="", meaning="a phase that this version does not know")
ROLLBACK: Final = "rollback"


def kind_of(name: str) -> Kind:
    """Return what is known about the phase called *name*, however it is spelt."""
    plain = _letters(re.sub(r"\bt[0-4]\b", "", name.lower()))
    return next((kind for kind in KINDS if _letters(kind.name) == plain), OTHER)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseKind:
    """One phase of one recovery: its *kind*, the *label* to show, its *seconds* and its *share* of all of them."""

    kind: Kind
    label: str
    seconds: float
    share: float


def parts(phases: Sequence[Phase]) -> tuple[PhaseKind, ...]:
    """Return the phases of one recovery in order, each with its share of the whole."""
    ordered = sorted(phases, key=lambda phase: phase.position)
    whole = sum(max(0.0, phase.seconds) for phase in ordered) or 1.0
    return tuple(_part(phase, whole) for phase in ordered)


def _part(phase: Phase, whole: float) -> PhaseKind:
    kind = kind_of(phase.name)
    seconds = max(0.0, phase.seconds)
    label = phase.name if kind is OTHER else kind.name
    return PhaseKind(kind=kind, label=label, seconds=seconds, share=seconds / whole)
