"""A recovery as it happens: its phases with their times, the fault, the action and its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.history.models import DecisionRecord, Incident, JobTransition
from holdfast.report.phases import PHASE_OF_STATE, label_of
from holdfast.report.text.wording import duration

ALWAYS: Final = ("detect", "diagnose", "isolate", "reschedule", "resume")
"""Phases that every recovery has, in their order."""
SHOWN_AFTER: Final = 10.0
"""Seconds for which a recovery that is over is still shown: most take less than a second."""
CLOCKS_DIFFER: Final = 0.5
"""Seconds by which a transition may be recorded before the incident that caused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPhase:
    """One phase of a recovery."""

    name: str
    seconds: float | None = None
    """None: not reached yet."""
    running: bool = False

    @property
    def text(self) -> str:
        """Return name and time; the phase that runs is marked."""
        took = "" if self.seconds is None else f" {duration(self.seconds)}"
        return f"▶ {label_of(self.name)}{took}" if self.running else f"{label_of(self.name)}{took}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The recovery of one incident at the time *at*."""

    incident: Incident
    at: float
    transitions: Sequence[JobTransition] = ()
    """Transitions of the job, oldest first."""
    decision: DecisionRecord | None = None
    """The newest one."""

    @property
    def is_over(self) -> bool:
        """Return whether the incident is closed."""
        return self.incident.closed_at is not None

    @property
    def is_shown(self) -> bool:
        """Return whether it runs, or has ended just now."""
        return self.incident.closed_at is None or self.at - self.incident.closed_at < SHOWN_AFTER

    @property
    def seconds(self) -> float:
        """Return the downtime, so far if the recovery still runs."""
        if self.is_over and self.incident.downtime_s is not None:
            return self.incident.downtime_s
        return max(0.0, (self.incident.closed_at or self.at) - self.incident.fault_at)

    @property
    def phases(self) -> list[RecoveryPhase]:
        """Return the phases: the time of each so far (several times are added), and which one runs."""
        end = self.incident.fault_at + self.seconds
        times, names = dict[str, float](), [*ALWAYS]
        name, since = "detect", self.incident.fault_at
        for row in self.transitions:
            if not self.incident.detected_at - CLOCKS_DIFFER <= row.at <= end or row.after not in PHASE_OF_STATE:
                continue
            times[name] = times.get(name, 0.0) + max(0.0, row.at - since)
            name, since = PHASE_OF_STATE[row.after], max(since, row.at)
        times[name] = times.get(name, 0.0) + max(0.0, end - since)
        if "wait" in times:
            names.insert(names.index("resume"), "wait")
        return [RecoveryPhase(name=one, seconds=times.get(one), running=one == name and not self.is_over) for one in names]

    @property
    def phase(self) -> RecoveryPhase | None:
        """Return the phase that runs."""
        return next((one for one in self.phases if one.running), None)

    @property
    def action(self) -> str:
        """Return the recovery action; empty before the decision."""
        return (self.decision.action if self.decision else self.incident.action) or ""

    @property
    def reason(self) -> str:
        """Return the reason of the decision."""
        return self.decision.reason if self.decision else self.incident.reason

    def as_record(self) -> dict[str, Any]:
        """Return the recovery for programs; times in seconds."""
        running = self.phase
        return {
            "incident": self.incident.number,
            "kind": self.incident.kind,
            "target": self.incident.target,
            "action": self.action or None,
            "reason": self.reason or None,
            "phase": running.name if running else None,
            "phases": {one.name: one.seconds for one in self.phases},
            "seconds": self.seconds,
            "outcome": self.incident.outcome,
        }


def phase_times(phases: Sequence[RecoveryPhase]) -> str:
    """Return the phases that took place as text: ``detect 1.02 s, diagnose 3.0 ms``."""
    return ", ".join(one.text for one in phases if one.seconds is not None)
