"""A job's life as the accounts need it: numbers and names alone, times in microseconds since 1970. What reads it is `timeline_reader`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.accounting.steps import StepSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpan:
    """One generation."""

    number: int
    at: int
    devices: int
    first_step_at: int | None = None
    """When it was at work: its first step, or for scripts that tell of none the start of all ranks."""
    snapshots: float = 0.0
    """Share of its steps that snapshots took."""


class PhaseTime(NamedTuple):
    """One phase of a recovery."""

    name: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSpan:
    """One incident: it kept the job from *fault_at* to *back_at*."""

    id: str
    number: int
    kind: str
    fault_at: int
    back_at: int
    generation_after: int | None
    outcome: str | None = None
    until_started: bool = False
    """Its end is the start of the processes, as no step was reported: training may have begun later."""
    phases: Sequence[PhaseTime] = ()
    """In their order, without the rollback."""

    @property
    def stalled(self) -> bool:
        """Tell whether it cut the work of its generation short: one that passed by itself did not."""
        return self.outcome != "passed"


class SaveSpan(NamedTuple):
    """A checkpoint for which training stood."""

    at: int
    generation: int
    stood: int


class Spares(NamedTuple):
    """From *at* on so many devices of the job's nodes hold no rank."""

    at: int
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimeline:
    """One job, from *begin* to *end*."""

    begin: int
    end: int
    ended: bool
    devices: int
    """While no generation is known yet."""
    eras: Sequence[GenerationSpan] = ()
    troubles: Sequence[IncidentSpan] = ()
    steps: Mapping[int, StepSpans] = field(default_factory=dict)
    """By generation."""
    tells_steps: bool = True
    saves: Sequence[SaveSpan] = ()
    spares: Sequence[Spares] = ()
    suspensions: Sequence[tuple[int, int]] = ()
    """From when to when it was suspended: it held no nodes then, and nothing of that time is booked."""
    full: int = 0
    """Devices at the width that was asked for."""
