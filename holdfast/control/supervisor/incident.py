"""The incident in work: its faults, what was tried, and where its seconds went."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from detectors.catalogue import Fault
from detectors.diagnosis import Diagnosis
from holdfast.control.state.generation import GenerationState
from holdfast.history import Recorder, models
from policies.case import Case
from policies.escalation import Decision, RecoveryAction

PHASES: Final = (
    "detect",
    "diagnose",
    "isolate",
    "failed attempt",
    "wait",
    "reschedule",
    "communication",
    "load",
    "warm-up",
    "rollback",
)


@dataclass(slots=True, kw_only=True)
class IncidentInWork:
    """One incident from its first fault to the first new step."""

    row: models.Incident
    lap_at: float
    """When the phase that runs now began."""
    board: GenerationState
    """What was known when the fault came: the steps that a rollback loses are on it."""
    faults: list[Fault] = field(default_factory=list)
    fault_rows: list[models.Fault] = field(default_factory=list)
    decisions: list[models.Decision] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    verdict: models.Verdict | None = None
    """The newest verdict, with what was weighed."""
    decision: Decision | None = None
    case: Case | None = None
    """What the newest decision was made from, with what rules noted."""
    tried: list[RecoveryAction] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Members that cannot hold ranks any more."""
    silent_since: dict[str, float] = field(default_factory=dict)
    """When the agents of those among them that were looked at twice were last known to speak (wall clock)."""
    seconds: dict[str, float] = field(default_factory=dict)
    action_at: float = 0.0
    """When the action in work began."""
    takeovers: int = 0
    """Take-overs that were begun."""
    approved: set[str] = field(default_factory=set)
    """Nodes that may be isolated though too few are left: a person said so, or nobody said otherwise in time."""
    barred: str = ""
    """Why no take-over can answer this incident any more."""

    def note_order(self, recorder: Recorder) -> None:
        """Record when the orders of an action had gone out, and been answered: the incident's first, and those of every attempt."""
        now, facts = time.time(), self.row.facts or {}
        action = self.decision.action if self.decision is not None else ""
        self.row.facts = {**facts, "orders": [*facts.get("orders", ()), {"action": action, "at": now}]}
        if self.row.ordered_at is None:
            self.row.ordered_at = now
        recorder.amend(models.Incident, self.row.id, ordered_at=self.row.ordered_at, facts=self.row.facts)

    def lap(self, phase: str, now: float) -> None:
        """Count the time since the last lap to *phase*."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, now - self.lap_at)
        self.lap_at = max(self.lap_at, now)

    def phases(self) -> list[tuple[str, float]]:
        """Return the phases that took place, in their order."""
        return [(name, self.seconds[name]) for name in PHASES if name in self.seconds]

    def rows(self) -> list[models.Phase]:
        """Return the phases as rows of the history."""
        return [
            models.Phase(job_id=self.row.job_id, incident_id=self.row.id, position=position, name=name, seconds=seconds)
            for position, (name, seconds) in enumerate(self.phases())
        ]
