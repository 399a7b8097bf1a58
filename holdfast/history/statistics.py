"""Measurements from the history: how often nodes fail, how long recoveries take, what saves and steps of a job cost.

Each query reads as few rows as it needs: a job may have millions of steps, of which only the newest count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any, Final, NamedTuple

from sqlalchemy import func
from sqlmodel import Session, col, select

from holdfast.history.models import Checkpoint, FaultRecord, Generation, Incident, Job, JobTransition, Lease, Phase, StepRecord
from holdfast.history.queries import TERMINAL
from holdfast.history.store import History
from holdfast.policies.recovery.case import IN_PROCESS

RUNS: Final = 5
"""Newest runs of a job that represent its present costs."""
SAVES: Final = 50
STEPS: Final = 1000
RECOVERIES: Final = 500
"""Newest rows that a statistic is computed from."""
USER_ERROR: Final = "user-error"
"""Level of faults of the user's script, which say nothing about the nodes."""
NO_FAULT: Final = frozenset({"passed", "stopped"})
"""Outcomes of incidents that interrupted nothing, or that a person ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatistics:
    """All jobs of the history together."""

    jobs: int = 0
    node_hours: float = 0.0
    """Sum over all nodes of the hours for which they belonged to a generation."""
    faults: int = 0
    """Incidents that interrupted training and were not caused by the script."""
    actions: dict[str, int] = field(default_factory=dict)
    """Recovery action to the number of recoveries by it, most frequent first."""
    back: int = 0
    """Recoveries that resumed from a checkpoint."""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase to its median seconds in a recovery; a recovery without it counts as zero."""

    @property
    def recoveries(self) -> int:
        """Return how many incidents ended in a recovery."""
        return sum(self.actions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """What saves and steps of a job cost, over its newest runs."""

    saves: int = 0
    """Measured saves."""
    save_s: float | None = None
    """Median seconds for which training stopped for a save."""
    overlapped_s: float | None = None
    """Median seconds of writing while training continued; empty if the ranks write themselves."""
    steps: int = 0
    step_s: float | None = None
    """Median seconds of a step, without the save after it."""
    spacing: int | None = None
    """Measured steps between saves, in the newest generation with two saves."""


class SaveStatistics(NamedTuple):
    """The seconds of one save."""

    seconds: float
    """For which training stopped."""
    overlapped_s: float | None
    """For which it was written while training continued; None if training stopped for the whole save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Median seconds of saves."""

    saves: int
    save_s: float | None
    overlapped_s: float | None


def costs_of(saves: Collection[SaveStatistics]) -> SaveCosts:
    """Return the medians of overlapped saves if there are any, else of all: the others are a job's first and last ones."""
    overlapped = [one for one in saves if one.overlapped_s is not None]
    seconds = [one.seconds for one in overlapped or saves]
    return SaveCosts(
        saves=len(seconds),
        save_s=median(seconds) if seconds else None,
        overlapped_s=median(one.overlapped_s or 0.0 for one in overlapped) if overlapped else None,
    )


def fleet(history: History, *, now: float | None = None) -> FleetStatistics:
    """Return the statistics of all jobs; live ones count until *now*."""
    at = time.time() if now is None else now
    with history.session() as session:
        jobs = session.exec(select(func.count()).select_from(Job)).one()
        hours = _node_hours(session, at)
        incidents = _interruptions(session)
        recovered = [one for one in incidents if one.outcome == "recovered"]
        phases = _phases(session, recovered[-RECOVERIES:])
    actions = Counter(one.action or "none" for one in recovered)
    back = sum(resumed_from_checkpoint(one) for one in recovered)
    return FleetStatistics(
        jobs=jobs, node_hours=hours, faults=len(incidents), actions=dict(actions.most_common()), back=back, phases=phases
    )


def work(history: History, name: str) -> StepStatistics:
    """Return what saves and steps of the job called *name* cost."""
    with history.session() as session:
        runs = list(session.exec(select(Job.id).where(col(Job.name) == name).order_by(col(Job.id).desc()).limit(RUNS)))
        complete = (col(Checkpoint.job_id).in_(runs), col(Checkpoint.problem).is_(None), col(Checkpoint.seconds).is_not(None))
        saved = list(session.exec(select(Checkpoint).where(*complete).order_by(col(Checkpoint.id).desc()).limit(SAVES)))
        steps = list[float]()
        for job in runs:
            query = (
                select(StepRecord.seconds)
                .where(col(StepRecord.job_id) == job)
                .order_by(col(StepRecord.generation).desc(), col(StepRecord.step).desc())
            )
            steps += session.exec(query.limit(STEPS - len(steps)))
    return StepStatistics(
        **asdict(costs_of([SaveStatistics(one.seconds, one.overlapped_s) for one in saved if one.seconds is not None])),
        steps=len(steps),
        step_s=median(steps) if steps else None,
        spacing=_spacing(saved),
    )


def _node_hours(session: Session, now: float) -> float:
    """Return the node-hours of all generations; one without an end lasts until its job's end, or until its last sign of life."""
    ends: dict[str, float] = dict(
        session.exec(
            select(JobTransition.job_id, func.max(JobTransition.at))
            .where(col(JobTransition.after).in_(TERMINAL))
            .group_by(col(JobTransition.job_id))
        ).all()
    )
    controlled = set(session.exec(select(Lease.job_id).where(col(Lease.expires_at) > now)))
    found = list(session.exec(select(Generation).order_by(col(Generation.job_id), col(Generation.number))))
    hours = 0.0
    for one, after in zip_longest(found, found[1:]):
        end = one.ended_at
        if end is None and after is not None and after.job_id == one.job_id:
            end = after.at
        elif end is None:
            end = ends.get(one.job_id) or (now if one.job_id in controlled else _last_step_at(session, one.job_id, one.number))
        hours += max(0.0, (end or one.at) - one.at) / 3600 * len(one.ranks)
    return hours


def _last_step_at(session: Session, job: str, generation: int) -> float | None:
    """Return when a generation reported its newest step."""
    mine = (col(StepRecord.job_id) == job, col(StepRecord.generation) == generation)
    return session.exec(select(StepRecord.at).where(*mine).order_by(col(StepRecord.step).desc()).limit(1)).first()


def _interruptions(session: Session) -> list[Incident]:
    """Return the incidents that count as failures of nodes, oldest first."""
    of_script = select(FaultRecord.incident_id).where(
        col(FaultRecord.root).is_(True), col(FaultRecord.recommended_action) == USER_ERROR, col(FaultRecord.incident_id).is_not(None)
    )
    found = session.exec(select(Incident).where(col(Incident.id).not_in(of_script)).order_by(col(Incident.id)))
    return [one for one in found if one.outcome not in NO_FAULT]


def resumed_from_checkpoint(one: Incident) -> bool:
    """Return whether a recovery resumed from a checkpoint: it ended all processes, or no live copy was left, and none was in memory."""
    source = (one.facts or {}).get("source")
    return source == "checkpoint" or (one.action not in IN_PROCESS and source != "memory")


def _phases(session: Session, recovered: Sequence[Incident]) -> dict[str, float]:
    """Return the median seconds of each phase over the incidents *recovered*."""
    by_incident: dict[str, Counter[str]] = {one.id: Counter() for one in recovered}
    if not by_incident:
        return {}
    rows: Any = session.exec(select(Phase.incident_id, Phase.name, Phase.seconds).where(col(Phase.incident_id).in_(by_incident)))
    names: dict[str, None] = {}
    for incident, name, seconds in rows:
        by_incident[incident][name] += max(0.0, seconds)
        names[name] = None
    timed = [phases for phases in by_incident.values() if phases]
    return {name: median(phases[name] for phases in timed) for name in names}


def _spacing(saved: Sequence[Checkpoint]) -> int | None:
    """Return the median distance between saves in the newest generation that has two."""
    by_generation: dict[tuple[str, int], list[int]] = {}
    for one in saved:
        if one.step is not None:
            by_generation.setdefault((one.job_id, one.generation), []).append(one.step)
    for steps in by_generation.values():
        gaps = [later - earlier for later, earlier in pairwise(steps) if later > earlier]
        if gaps:
            return round(median(gaps))
    return None
