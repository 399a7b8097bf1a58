"""How often a job saves: from what the history and the running flow have measured to what the policy advises."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Final

from holdfast.history import models
from holdfast.history.statistics import SAVES, FleetStatistics, SaveStatistics, StepStatistics, costs_of, went_back
from holdfast.report.phases import kind_of
from holdfast.spec.job import CheckpointPlan
from policies.checkpoint_interval import RECOVERY_S, IntervalCase, IntervalLimits, Rate, advise, differs, rate_of, rollback_share

ENOUGH: Final = 3
"""Saves that must have been measured before a cadence is changed for their sake: the first may be slower than all others."""

SHORTEST: Final = 1e-6
"""Seconds: no save is shorter, whatever a coarse clock says."""

_PARTS: Final = {"T1": "reschedule", "T2": "communication", "T3": "load", "T4": "compilation", "T0": "rollback"}
"""Part of a fault's loss by the term of the phase that it is; phases without a term are the detection."""


def parts_of(fleet: FleetStatistics) -> dict[str, float]:
    """Return the seconds of each part of a recovery, named as in `policies.checkpoint_interval.ExpectedLoss`; empty before one."""
    parts: dict[str, float] = {}
    for name, seconds in fleet.phases.items():
        part = _PARTS.get(kind_of(name).term, "detection")
        parts[part] = parts.get(part, 0.0) + seconds
    parts.pop("rollback", None)  # it follows from the cadence
    return parts


def recovery_of(fleet: FleetStatistics) -> float:
    """Return the downtime of one fault: the parts that were measured together, or what is assumed."""
    return sum(parts_of(fleet).values()) or RECOVERY_S


def case_of(fleet: FleetStatistics, work: StepStatistics, nodes: int) -> tuple[IntervalCase | None, Rate]:
    """Return what the policy is asked about a job on *nodes* nodes (nothing before a save and a step are measured), and the rate."""
    rate = rate_of(fleet.faults, fleet.node_hours)
    if work.save_s is None or not work.step_s:
        return None, rate
    case = IntervalCase(
        save_s=max(work.save_s, SHORTEST),
        step_s=work.step_s,
        between_s=rate.between_s(nodes),
        rollback=rollback_share(fleet.back, fleet.recoveries),
        recovery_s=recovery_of(fleet),
        overlapped_s=work.overlapped_s or 0.0,
    )
    return case, rate


def limits_of(plan: CheckpointPlan) -> IntervalLimits:
    """Return the limits of a job's plan as the policy reads them."""
    return IntervalLimits(least=plan.every_least, most=plan.every_most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Steps between two checkpoints from now on, and why."""

    every: int
    reason: str


@dataclass(slots=True, kw_only=True)
class CheckpointInterval:
    """What a flow knows about the cadence of its job. It asks no database: a recovery must not wait for one."""

    plan: CheckpointPlan
    fleet: FleetStatistics
    """As it was when this flow took the job."""
    work: StepStatistics
    answered: Collection[str] = frozenset()
    """Incidents that the figures of the fleet have in them."""
    began: float = field(default_factory=time.time)
    _saves: deque[SaveStatistics] = field(default_factory=lambda: deque(maxlen=SAVES))
    _actions: dict[str, int] = field(default_factory=dict)
    _back: int = 0

    def note_saved(self, seconds: float, beside: float | None) -> None:
        """Learn what a save took: for how long training stood still, and how long it was written *beside* it."""
        self._saves.append(SaveStatistics(seconds, beside))

    def note_recovered(self, incident: models.Incident) -> None:
        """Learn how a recovery went."""
        action = incident.action or ""
        self._actions[action] = self._actions.get(action, 0) + 1
        self._back += went_back(incident)

    def choose(self, present: int | None, *, nodes: int, incidents: Collection[str], steps: Collection[float]) -> Choice | None:
        """Return what to save by from the next generation on, if that is ours to say.

        *present* is the number by now (empty at the launch), *incidents* are those that were answered so far, *steps* are times of steps.
        """
        if self.plan.every != "auto":
            return None
        now, work = present or self.plan.first, self._work(steps)
        case, _ = case_of(self._fleet(nodes, incidents), work, nodes)
        if case is None or work.saves < ENOUGH:
            return Choice(every=now, reason=f"{work.saves} save(s) have been measured, {ENOUGH} are needed to judge what they cost")
        advice = advise(case, limits_of(self.plan))
        if not differs(now, advice.steps):
            return Choice(every=now, reason=f"it is near the best, {advice.steps:,}: {advice.reason}")
        return Choice(every=advice.steps, reason=advice.reason)

    def _work(self, steps: Collection[float]) -> StepStatistics:
        """Return what the job's work costs: as this flow saw it, else as the history has it from before."""
        known = self.work
        if self._saves and (len(self._saves) >= ENOUGH or known.save_s is None):
            known = replace(known, **asdict(costs_of(self._saves)))
        return replace(known, steps=len(steps), step_s=median(steps)) if steps else known

    def _fleet(self, nodes: int, incidents: Collection[str]) -> FleetStatistics:
        """Return the fleet with what this job has been through since."""
        before, actions = self.fleet, dict(self.fleet.actions)
        for action, number in self._actions.items():
            actions[action] = actions.get(action, 0) + number
        return replace(
            before,
            node_hours=before.node_hours + max(0.0, time.time() - self.began) / 3600 * nodes,
            faults=before.faults + len(set(incidents) - set(self.answered)),
            actions=actions,
            back=before.back + self._back,
        )
