"""Faults that hit a simulated job, its incidents, and the recoveries that were decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.policies.recovery.case import RecoveryAction
from holdfast.simulator.causes import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A fault of a node of the job, or one of its processes."""

    node: str
    cause: Cause
    at: float
    breaks: bool
    """The node cannot run ranks until it is repaired."""
    repair: float = 0.0
    """Seconds that the repair of a node takes that works until then."""
    corrupt_since: float | None = None
    """Training done when results became wrong; None: they did not."""
    signature: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A recovery that was decided."""

    at: float
    action: RecoveryAction
    node: str | None
    best: int
    incident: int
    kind: str
    step: int | None


@dataclass(slots=True, kw_only=True)
class IncidentInWork:
    """An incident until training goes on."""

    number: int
    at: float
    hits: list[Hit] = field(default_factory=list)
    tried: list[RecoveryAction] = field(default_factory=list)
    replacement_attempts: int = 0
    broken_off: bool = False
    """An attempt was broken off by another fault."""
    places: dict[str, int] = field(default_factory=dict)
    """Places that its nodes had when they were lost."""
