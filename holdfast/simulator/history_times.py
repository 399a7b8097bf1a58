"""Phase times of the recoveries in a history, in place of published ones: what this site's jobs really took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import sqlalchemy
from sqlalchemy import func
from sqlmodel import col

from holdfast.detectors.associations import belongs
from holdfast.history.models import DecisionRecord, Incident, Phase
from holdfast.history.store import History
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.simulator.causes import Symptom
from holdfast.simulator.phase_times import Phases, PhaseTime
from holdfast.simulator.systems import RecoveryPlan, RecoverySystem

ENOUGH: Final = 3
"""Recoveries by an action from which on their times replace published ones."""
OURS: Final = ("isolate", "reschedule", "communication", "load", "warm-up")
"""Phases of a plan in order: waiting, failed attempts and the rollback are simulated."""
FAILED: Final = "failed attempt"
SHOWN_BY: Final = {Symptom.CRASH: "worker-end", Symptom.NODE_LOST: "node-gone", Symptom.HANG: "stall"}
"""Groups of fault kinds (`detectors/associations.toml`) that show in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRecovery:
    """What is on record of one recovery."""

    kind: str
    """Fault kind of the root cause."""
    action: str
    """The action that brought the job back: the last one."""
    decisions: int
    phases: Mapping[str, float]
    """Seconds by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTimes:
    """Measured seconds of each phase by action."""

    by_action: Mapping[str, Mapping[str, Sequence[float]]]
    recoveries: Mapping[str, int]
    """Recoveries by action."""
    enough: int = ENOUGH
    """Values from which on measured ones replace others."""
    detect: Mapping[str, Sequence[float]]
    """Seconds from a fault until the controller knew of it, by fault kind."""
    decide: Sequence[float] = ()
    """Seconds from then until the first decision."""
    failed: Sequence[float] = ()
    """Seconds that failed attempts took, of recoveries that needed several decisions."""

    @property
    def used(self) -> dict[str, int]:
        """Return the actions with enough recoveries, and how many."""
        return {action: number for action, number in self.recoveries.items() if number >= self.enough}

    def applied_to(self, system: RecoverySystem) -> RecoverySystem:
        """Return *system* with the measured times, if Holdfast decides for it; what was not measured keeps its source."""
        if not system.managed:
            return system
        plans = {action: self._plan(action, plan) for action, plan in system.plans.items()}
        cold = {action: self._plan(action, plan) for action, plan in system.cold.items()}
        detect = dict(system.detect)
        for symptom, group in SHOWN_BY.items():
            some = [one for kind, values in self.detect.items() if belongs(kind, group) for one in values]
            detect |= {symptom: _measured(some)} if len(some) >= self.enough else {}
        kinds = {kind: _measured(some) for kind, some in self.detect.items() if len(some) >= self.enough}
        decide = _measured(self.decide) if len(self.decide) >= self.enough else system.decide
        failed = _measured(self.failed) if len(self.failed) >= self.enough else system.failed_attempt
        return replace(system, plans=plans, cold=cold, detect=detect, detect_kinds=kinds, decide=decide, failed_attempt=failed)

    def _plan(self, action: RecoveryAction, plan: RecoveryPlan) -> RecoveryPlan:
        if action not in self.used:
            return plan
        source = f"history: {self.recoveries[action]} recoveries by {action}"
        phases: Phases = tuple((name, PhaseTime(measured=tuple(some), source=source)) for name, some in self.by_action[action].items())
        return replace(plan, phases=phases)


def _measured(values: Sequence[float]) -> PhaseTime:
    return PhaseTime(measured=tuple(values), source=f"history: {len(values)} recoveries")


def read_times(history: History) -> HistoryTimes:
    """Return the phase times in *history*."""
    decided = (
        sqlalchemy.select(col(DecisionRecord.incident_id).label("incident"), func.count().label("decisions"))
        .group_by(col(DecisionRecord.incident_id))
        .subquery()
    )
    wanted = (
        sqlalchemy.select(
            col(Incident.id), col(Incident.kind), col(Incident.action), decided.c.decisions, col(Phase.name), func.sum(col(Phase.seconds))
        )
        .join(Phase, col(Phase.incident_id) == col(Incident.id))
        .join(decided, decided.c.incident == col(Incident.id))
        .where(col(Incident.outcome) == "recovered", col(Incident.action).is_not(None))
        .group_by(col(Incident.id), col(Incident.kind), col(Incident.action), decided.c.decisions, col(Phase.name))
        .order_by(col(Incident.id))
    )
    found = defaultdict[tuple[str, str, str, int], dict[str, float]](dict)
    with history.session() as session:
        for incident, kind, action, decisions, name, spent in session.connection().execute(wanted):
            found[incident, kind, action, decisions][name] = max(0.0, float(spent))
    return times_of(
        MeasuredRecovery(kind=kind, action=action, decisions=decisions, phases=phases)
        for (_, kind, action, decisions), phases in found.items()
    )


def times_of(measured: Iterable[MeasuredRecovery]) -> HistoryTimes:
    """Return the phase times of recoveries: of those by a single decision, and where an action has too few of these, of all by it."""
    every, by_action = list(measured), dict[str, Mapping[str, Sequence[float]]]()
    recoveries = dict[str, int]()
    for action in dict.fromkeys(one.action for one in every):
        some = [one for one in every if one.action == action]
        once = [one for one in some if one.decisions == 1]
        chosen = once if len(once) >= ENOUGH else some
        names = [name for name in OURS if any(name in one.phases for one in chosen)]
        by_action[action] = {name: [one.phases.get(name, 0.0) for one in chosen] for name in names}
        recoveries[action] = len(chosen)
    detect = defaultdict[str, list[float]](list)
    for one in every:
        if "detect" in one.phases:
            detect[one.kind].append(one.phases["detect"])
    decide = [one.phases["diagnose"] for one in every if one.decisions == 1 and "diagnose" in one.phases]
    failed = [one.phases.get(FAILED, 0.0) for one in every if one.decisions > 1]
    return HistoryTimes(by_action=by_action, recoveries=recoveries, detect=detect, decide=decide, failed=failed)
