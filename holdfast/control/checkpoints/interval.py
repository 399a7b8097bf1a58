"""The checkpoint interval of a job: from what the history and the running controller have measured to what the policy advises."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Final

from holdfast.history import models
from holdfast.history.statistics import SAVES, FleetStatistics, SaveStatistics, StepStatistics, costs_of, resumed_from_checkpoint
from holdfast.plurals import plural
from holdfast.policies.checkpoint_interval import RECOVERY_S, IntervalCase, IntervalLimits, Rate, advise, differs, rate_of, rollback_share
from holdfast.report.phases import kind_of
from holdfast.spec.job import CheckpointPlan

ENOUGH: Final = 3
"""Measured saves that are needed before they change the interval: the first may be slower than all others."""

SHORTEST: Final = 1e-6
"""Seconds: no save is shorter, whatever a coarse clock measures."""

_PARTS: Final = {"T1": "reschedule", "T2": "communication", "T3": "load", "T4": "compilation", "T0": "rollback"}
"""The part of a fault's loss by the term of its phase; phases without a term are the detection."""


def parts_of(fleet: FleetStatistics) -> dict[str, float]:
    """Return the seconds of each part of a recovery, named as in `holdfast.policies.checkpoint_interval.ExpectedLoss`; empty before one."""
    parts: dict[str, float] = {}
    for name, seconds in fleet.phases.items():
        part = _PARTS.get(kind_of(name).term, "detection")
        parts[part] = parts.get(part, 0.0) + seconds
    parts.pop("rollback", None)  # it follows from the interval
    return parts


def recovery_of(fleet: FleetStatistics) -> float:
    """Return the downtime of one fault: the sum of the measured parts, or the assumed one."""
    return sum(parts_of(fleet).values()) or RECOVERY_S


def case_of(fleet: FleetStatistics, work: StepStatistics, nodes: int) -> tuple[IntervalCase | None, Rate]:
    """Return the policy's case for a job on *nodes* nodes (None before a save and a step are measured), and the fault rate."""
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
    """Return the limits of a job's plan for the policy."""
    return IntervalLimits(least=plan.min_interval, most=plan.max_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    """Steps between two checkpoints from now on, and why."""

    every: int
    reason: str


@dataclass(slots=True, kw_only=True)
class CheckpointInterval:
    """What a controller knows about the checkpoint interval of its job. It reads no database: a recovery must not wait for one."""

    plan: CheckpointPlan
    fleet: FleetStatistics
    """As it was when this controller took the job."""
    work: StepStatistics
    answered: Collection[str] = frozenset()
    """Incidents that the statistics of the fleet include."""
    began: float = field(default_factory=time.time)
    _saves: deque[SaveStatistics] = field(default_factory=lambda: deque(maxlen=SAVES))
    _actions: dict[str, int] = field(default_factory=dict)
    _back: int = 0

    def note_saved(self, seconds: float, overlapped: float | None) -> None:
        """Note a save: for how many *seconds* training paused, and for how many it continued while the save was written."""
        self._saves.append(SaveStatistics(seconds, overlapped))

    def note_recovered(self, incident: models.Incident) -> None:
        """Note a recovery."""
        action = incident.action or ""
        self._actions[action] = self._actions.get(action, 0) + 1
        self._back += resumed_from_checkpoint(incident)

    def choose(self, present: int | None, *, nodes: int, incidents: Collection[str], steps: Collection[float]) -> IntervalChoice | None:
        """Return the interval from the next generation on; None where the job sets it.

        *present* is the current interval (None at the launch), *incidents* are those that were handled so far, *steps* are times of steps.
        """
        if self.plan.interval != "auto":
            return None
        now, work = present or self.plan.first, self._work(steps)
        case, _ = case_of(self._fleet(nodes, incidents), work, nodes)
        if case is None or work.saves < ENOUGH:
            measured = plural(work.saves, "save has", "saves have")
            return IntervalChoice(every=now, reason=f"{measured} been measured, {ENOUGH} are needed to judge what they cost")
        advice = advise(case, limits_of(self.plan))
        if not differs(now, advice.steps):
            return IntervalChoice(every=now, reason=f"it is near the best, {advice.steps:,}: {advice.reason}")
        return IntervalChoice(every=advice.steps, reason=advice.reason)

    def _work(self, steps: Collection[float]) -> StepStatistics:
        """Return the costs of the job's steps and saves: as this controller measured them, else from the history."""
        known = self.work
        if self._saves and (len(self._saves) >= ENOUGH or known.save_s is None):
            known = replace(known, **asdict(costs_of(self._saves)))
        return replace(known, steps=len(steps), step_s=median(steps)) if steps else known

    def _fleet(self, nodes: int, incidents: Collection[str]) -> FleetStatistics:
        """Return the fleet's statistics with those of this job since."""
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
