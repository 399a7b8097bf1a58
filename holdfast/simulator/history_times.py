"""Phase times of the recoveries in a history, in place of published ones: what this site's jobs really took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import sqlalchemy
from sqlalchemy import func
from sqlmodel import col

from holdfast.history.models import DecisionRecord, Incident, Phase
from holdfast.history.store import History
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.simulator.causes import Symptom
from holdfast.simulator.phase_times import Phases, PhaseTime
from holdfast.simulator.systems import RecoveryPlan, RecoverySystem

ENOUGH: Final = 3
"""Recoveries by an action from which on their times replace published ones."""
OURS: Final = frozenset({"isolate", "reschedule", "communication", "load", "warm-up"})
"""Phases of a plan: waiting, failed attempts and the rollback are simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTimes:
    """Measured seconds of each phase by action, of recoveries that needed one decision."""

    by_action: Mapping[str, Mapping[str, Sequence[float]]]
    recoveries: Mapping[str, int]
    """Recoveries by action."""
    detect: Sequence[float]
    """Seconds from a fault until the controller knew of it, of all these recoveries."""

    @property
    def used(self) -> dict[str, int]:
        """Return the actions with enough recoveries, and how many."""
        return {action: number for action, number in self.recoveries.items() if number >= ENOUGH}

    def applied_to(self, system: RecoverySystem) -> RecoverySystem:
        """Return *system* with the measured times, if Holdfast decides for it; what was not measured keeps its source."""
        if not system.managed:
            return system
        plans = {action: self._plan(action, plan) for action, plan in system.plans.items()}
        cold = {action: self._plan(action, plan) for action, plan in system.cold.items()}
        detect = dict(system.detect)
        if len(self.detect) >= ENOUGH:
            measured = PhaseTime(measured=tuple(self.detect), source=f"history: {len(self.detect)} recoveries")
            detect |= {Symptom.CRASH: measured, Symptom.NODE_LOST: measured}
        return replace(system, plans=plans, cold=cold, detect=detect)

    def _plan(self, action: RecoveryAction, plan: RecoveryPlan) -> RecoveryPlan:
        if action not in self.used:
            return plan
        source = f"history: {self.recoveries[action]} recoveries by {action}"
        phases: Phases = tuple((name, PhaseTime(measured=tuple(some), source=source)) for name, some in self.by_action[action].items())
        return replace(plan, phases=phases)


def read_times(history: History) -> HistoryTimes:
    """Return the phase times in *history*, of recoveries that a single decision brought about."""
    once = sqlalchemy.select(col(DecisionRecord.incident_id)).group_by(col(DecisionRecord.incident_id)).having(func.count() == 1)
    wanted = (
        sqlalchemy.select(col(Incident.id), col(Incident.action), col(Phase.name), func.sum(col(Phase.seconds)))
        .join(Phase, col(Phase.incident_id) == col(Incident.id))
        .where(col(Incident.outcome) == "recovered", col(Incident.action).is_not(None), col(Incident.id).in_(once))
        .group_by(col(Incident.id), col(Incident.action), col(Phase.name))
        .order_by(col(Incident.id))
    )
    incidents = defaultdict[tuple[str, str], dict[str, float]](dict)
    with history.session() as session:
        for incident, action, name, seconds in session.connection().execute(wanted):
            incidents[incident, action][name] = max(0.0, float(seconds))
    recoveries, by_action = defaultdict[str, int](int), defaultdict[str, dict[str, list[float]]](dict)
    names = defaultdict[str, set[str]](set)
    for (_, action), some in incidents.items():
        names[action] |= some.keys() & OURS
    for (_, action), some in incidents.items():
        recoveries[action] += 1
        for name in sorted(names[action]):
            by_action[action].setdefault(name, []).append(some.get(name, 0.0))
    detect = [some["detect"] for some in incidents.values() if "detect" in some]
    return HistoryTimes(by_action=by_action, recoveries=recoveries, detect=detect)
