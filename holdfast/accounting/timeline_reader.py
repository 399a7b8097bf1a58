"""Read job timelines from the history: a fixed number of queries per job, columns instead of objects. A million steps take seconds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import sqlalchemy
from sqlalchemy import func
from sqlmodel import Session, col, select

from holdfast.accounting.ledger import ROLLBACK, SECOND
from holdfast.accounting.timeline import (
    COLUMNS,
    GenerationSpan,
    IncidentSpan,
    JobTimeline,
    PhaseTime,
    SaveSpan,
    Spares,
    StepSpans,
    step_spans,
)
from holdfast.history.models import (
    DOWN_UNTIL,
    STARTED,
    Checkpoint,
    Generation,
    Incident,
    Job,
    JobTransition,
    Lease,
    NodeStatusChange,
    Phase,
    Snapshots,
    StepRecord,
)
from holdfast.history.queries import TERMINAL
from holdfast.history.store import History
from holdfast.report import phases

MARGIN: Final = 3600.0
"""Seconds before the requested time from which steps are read, because the step then under way began earlier."""
FETCH_SIZE: Final = 20_000
"""Steps fetched at once."""
SUSPENDED: Final = "SUSPENDED"
IN_USE: Final = frozenset({"healthy", "suspect"})
"""Statuses of a node that the job holds."""
PHASE_OF_STATE: Final = {**phases.PHASE_OF_STATE, "RESUMING": "warm-up"}
"""The phase of each job state, for open incidents: their phases are recorded when they close, and until then T2 to T4 count as T4."""


class Unit(NamedTuple):
    """The unit of the accounts."""

    name: str
    meaning: str
    by_rank: bool


COMPUTE: Final = Unit("compute-hours", "the time of every rank, usually one GPU each", by_rank=True)
NODES: Final = Unit("node-hours", "the time of every node, as the ranks of some generation are not known", by_rank=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """A job and its end, as far as known."""

    id: str
    name: str
    at: float
    spec: Mapping[str, Any]
    state: str
    end: float
    has_controller: bool
    """A controller runs it now."""

    @property
    def ended(self) -> bool:
        """Return whether it is in a terminal state."""
        return self.state in TERMINAL


@dataclass(slots=True, kw_only=True)
class TimelineReader:
    """Reads timelines in one session."""

    session: Session
    unit: Unit
    since: float | None
    status_changes: dict[str, list[tuple[float, str, str]]] = field(default_factory=lambda: defaultdict(list))
    """By job: time, node and its status."""

    def read(self, job: KnownJob, *, with_steps: bool = True) -> JobTimeline:
        """Return the timeline of *job*."""
        rows = self._generations(job.id)
        resumed_after = {one.number: one.resumed_step for one in rows if one.resumed_step is not None}
        steps = self._steps(job, resumed_after) if with_steps else {}
        shares = self._snapshot_shares(job.id)
        reports_steps = bool(steps) or self._has_steps(job.id)
        generations = [
            GenerationSpan(
                number=one.number,
                at=_micros(one.at),
                devices=self._devices(one.world_size, one.ranks),
                first_step_at=_work_begun(one, job, reports_steps=reports_steps),
                snapshots=shares.get(one.number, 0.0),
            )
            for one in rows
        ]
        return JobTimeline(
            begin=_micros(job.at),
            end=_micros(max(job.at, job.end)),
            ended=job.ended,
            devices=generations[0].devices if generations else self._requested_devices(job.spec),
            generations=generations,
            incidents=self._incidents(job),
            steps=steps,
            reports_steps=reports_steps,
            saves=self._saves(job.id),
            spares=list(self._spares(job, rows)),
            suspensions=list(self._suspensions(job)),
            full_devices=self._requested_devices(job.spec),
        )

    def _devices(self, world_size: int, ranks: Mapping[str, Any]) -> int:
        """Return the devices of a generation, or its nodes."""
        return world_size if self.unit.by_rank else len(ranks)

    def _requested_devices(self, spec: Mapping[str, Any]) -> int:
        """Return the devices that the job file requests; the job holds them before its first generation."""
        nodes, per_node = _max_nodes(spec), _ranks_per_node(spec)
        return nodes * per_node if self.unit.by_rank else nodes

    def _generations(self, job: str) -> Sequence[Any]:
        names = ("number", "at", "world_size", "ranks", "resumed_step", "first_step_at")
        wanted = (
            sqlalchemy.select(*(col(getattr(Generation, name)) for name in names))
            .where(col(Generation.job_id) == job)
            .order_by(col(Generation.number))
        )
        return self.session.connection().execute(wanted).all()

    def _steps(self, job: KnownJob, resumed_after: Mapping[int, int]) -> dict[int, StepSpans]:
        columns = sqlalchemy.select(*(col(getattr(StepRecord, name)) for name in COLUMNS.names or ())).where(
            col(StepRecord.job_id) == job.id
        )
        if self.since is not None and self.since > job.at:
            columns = columns.where(col(StepRecord.at) >= self.since - MARGIN)
        wanted = columns.order_by(col(StepRecord.generation), col(StepRecord.step))
        found = self.session.connection().execute(wanted, execution_options={"yield_per": FETCH_SIZE})
        parts = [np.rec.fromarrays(list(zip(*part, strict=True)), dtype=COLUMNS) for part in found.partitions()]
        table = np.concatenate(parts) if parts else np.empty(0, dtype=COLUMNS)
        return step_spans(table, resumed_after, until=_micros(max(job.at, job.end)))

    def _has_steps(self, job: str) -> bool:
        return self.session.exec(select(StepRecord.step).where(col(StepRecord.job_id) == job).limit(1)).first() is not None

    def _snapshot_shares(self, job: str) -> dict[int, float]:
        columns = (col(Snapshots.generation), col(Snapshots.cost_s), col(Snapshots.trained_s))
        rows = self.session.connection().execute(sqlalchemy.select(*columns).where(col(Snapshots.job_id) == job))
        return {number: min(1.0, max(0.0, cost / trained)) for number, cost, trained in rows if trained > 0}

    def _saves(self, job: str) -> list[SaveSpan]:
        mine = (col(Checkpoint.job_id) == job, col(Checkpoint.problem).is_(None), col(Checkpoint.seconds) > 0)
        columns = (col(Checkpoint.at), col(Checkpoint.generation), col(Checkpoint.seconds))
        rows: Iterable[Any] = self.session.connection().execute(sqlalchemy.select(*columns).where(*mine))
        return sorted(SaveSpan(_micros(at), generation, _micros(seconds)) for at, generation, seconds in rows)

    def _incidents(self, job: KnownJob) -> list[IncidentSpan]:
        columns = (
            Incident.id, Incident.number, Incident.kind, Incident.fault_at, Incident.downtime_s, Incident.closed_at,
            Incident.generation_after, Incident.outcome, Incident.facts,
        )  # fmt: skip
        wanted = sqlalchemy.select(*map(col, columns)).where(col(Incident.job_id) == job.id).order_by(col(Incident.number))
        rows = self.session.connection().execute(wanted).all()
        phases = self._phases(job.id) if rows else {}
        without = [one for one in rows if one.id not in phases]
        transitions = self._transitions(job.id) if without else []
        found = []
        for one in rows:
            recovered = recovered_at(one, job.end)
            found.append(
                IncidentSpan(
                    id=one.id,
                    number=one.number,
                    kind=one.kind,
                    fault_at=_micros(one.fault_at),
                    recovered_at=_micros(recovered),
                    generation_after=one.generation_after if one.outcome == "recovered" else None,
                    outcome=one.outcome,
                    until_started=(one.facts or {}).get(DOWN_UNTIL) == STARTED,
                    phases=phases.get(one.id) or _phases_by_state(transitions, one.fault_at, recovered),
                )
            )
        return found

    def _phases(self, job: str) -> dict[str, list[PhaseTime]]:
        columns = (col(Phase.incident_id), col(Phase.name), col(Phase.seconds), col(Phase.position))
        wanted = sqlalchemy.select(*columns).where(col(Phase.job_id) == job, col(Phase.name) != ROLLBACK).order_by(columns[0], columns[3])
        found: dict[str, list[PhaseTime]] = defaultdict(list)
        for incident, name, seconds, _ in self.session.connection().execute(wanted):
            found[incident].append(PhaseTime(name, _micros(max(0.0, seconds))))
        return found

    def _transitions(self, job: str) -> list[tuple[float, str]]:
        wanted = (
            sqlalchemy.select(col(JobTransition.at), col(JobTransition.after))
            .where(col(JobTransition.job_id) == job)
            .order_by(col(JobTransition.id))
        )
        return [(at, after) for at, after in self.session.connection().execute(wanted)]

    def _suspensions(self, job: KnownJob) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each suspension; one that lasts ends with the counted time."""
        wanted = (
            sqlalchemy.select(col(JobTransition.at), col(JobTransition.after))
            .where(col(JobTransition.job_id) == job.id)
            .order_by(col(JobTransition.id))
        )
        wanted = wanted.where(sqlalchemy.or_(col(JobTransition.before) == SUSPENDED, col(JobTransition.after) == SUSPENDED))
        begin: float | None = None
        for at, after in self.session.connection().execute(wanted):
            if after == SUSPENDED:
                begin = at
            elif begin is not None:
                yield _micros(begin), _micros(at)
                begin = None
        if begin is not None and job.end > begin:
            yield _micros(begin), _micros(job.end)

    def _spares(self, job: KnownJob, generations: Sequence[Any]) -> Iterator[Spares]:
        """Yield the devices of the job's nodes without a rank, at each change of nodes or ranks."""
        widest = max((len(ranks) for one in generations for ranks in one.ranks.values()), default=_ranks_per_node(job.spec))
        per_node = max(widest, _ranks_per_node(job.spec)) if self.unit.by_rank else 1
        changes: list[tuple[float, str, str, Any]] = [(at, node, status, None) for at, node, status in self.status_changes.get(job.id, ())]
        changes += [(one.at, "", "", one) for one in generations]
        nodes, current = set[str](), generations[0] if generations else None
        for at, node, status, generation in sorted(changes, key=lambda change: change[0]):
            if generation is not None:
                current = generation
            else:
                (nodes.add if status in IN_USE else nodes.discard)(node)
            if current is not None:
                spare = per_node * len(nodes.union(current.ranks)) - self._devices(current.world_size, current.ranks)
                yield Spares(_micros(at), max(0, spare))


def known_jobs(history: History, *, only: Sequence[Job] | None = None, since: float | None, now: float | None = None) -> list[KnownJob]:
    """Return the jobs of the history, or *only* these, that existed after *since*, oldest first.

    A live job without a controller counts until its last sign of life, not until *now*.
    """
    at = time.time() if now is None else now
    with history.session() as session:
        jobs = list(only) if only is not None else list(session.exec(select(Job).order_by(col(Job.id))))
        newest = select(func.max(col(JobTransition.id))).group_by(col(JobTransition.job_id))
        if only is not None:
            newest = newest.where(col(JobTransition.job_id).in_([job.id for job in jobs]))
        last = session.exec(select(JobTransition.job_id, JobTransition.after, JobTransition.at).where(col(JobTransition.id).in_(newest)))
        ends = {job: (after, when) for job, after, when in last}
        controlled = set(session.exec(select(Lease.job_id).where(col(Lease.expires_at) > at)))
        found = []
        for job in jobs:
            state, changed = ends.get(job.id, ("LAUNCHING", job.at))
            has_controller = job.id in controlled
            end = changed if state in TERMINAL else at if has_controller else max(changed, _last_report(session, job.id) or job.at)
            if since is None or end > since:
                found.append(
                    KnownJob(id=job.id, name=job.name, at=job.at, spec=job.spec, state=state, end=end, has_controller=has_controller)
                )
    return found


def unit_of(session: Session, jobs: Sequence[KnownJob], *, every: bool) -> Unit:
    """Return the unit in which all *jobs* (*every* one of the history, or some) can be counted, because only like units can be added."""
    wanted = select(Generation.id).where(col(Generation.world_size) <= 0)
    if not every:
        wanted = wanted.where(col(Generation.job_id).in_([job.id for job in jobs]))
    return COMPUTE if session.exec(wanted.limit(1)).first() is None else NODES


def status_changes(session: Session, jobs: Sequence[KnownJob], *, every: bool) -> dict[str, list[tuple[float, str, str]]]:
    """Return the status changes of the nodes of *jobs*, by job, in order."""
    wanted = sqlalchemy.select(
        col(NodeStatusChange.job_id), col(NodeStatusChange.at), col(NodeStatusChange.node), col(NodeStatusChange.status)
    )
    wanted = wanted.where(
        col(NodeStatusChange.job_id).is_not(None) if every else col(NodeStatusChange.job_id).in_([job.id for job in jobs])
    )
    found: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    rows: Iterable[Any] = session.connection().execute(wanted.order_by(col(NodeStatusChange.id)))
    for job, at, node, status in rows:
        found[job].append((at, node, status))
    return found


def _last_report(session: Session, job: str) -> float | None:
    """Return when the job last reported a step, or formed a generation."""
    step = session.exec(select(func.max(StepRecord.at)).where(col(StepRecord.job_id) == job)).first()
    generation = session.exec(select(func.max(Generation.at)).where(col(Generation.job_id) == job)).first()
    return max((at for at in (step, generation) if at is not None), default=None)


def _work_begun(generation: Any, job: KnownJob, *, reports_steps: bool) -> int | None:  # noqa: ANN401 (some columns of a generation)
    """Return when *generation* began its work, in microseconds; None while it starts.

    Of a script that reports no steps nobody knows when it trained: its ranks ran from their launch on, as soon as the job runs at all.
    """
    if generation.first_step_at is not None:
        return _micros(generation.first_step_at)
    return None if reports_steps or job.state == "LAUNCHING" else _micros(generation.at)


def recovered_at(incident: Any, end: float) -> float:  # noqa: ANN401 (some columns of an incident)
    """Return when the job trained again, or when the incident closed without that; an open one lasts until the *end*."""
    if incident.downtime_s is not None:
        return float(incident.fault_at + incident.downtime_s)
    return end if incident.closed_at is None else float(incident.closed_at)


def _phases_by_state(transitions: Sequence[tuple[float, str]], begin: float, end: float) -> list[PhaseTime]:
    """Return the phases from *begin* to *end* as the job's states show them."""
    found, at, phase = list[PhaseTime](), begin, "detect"
    for changed, after in transitions:
        if begin < changed < end:
            found.append(PhaseTime(phase, _micros(changed) - _micros(at)))
            at, phase = changed, PHASE_OF_STATE.get(after, phase)
    return [*found, PhaseTime(phase, max(0, _micros(end) - _micros(at)))]


def _max_nodes(spec: Mapping[str, Any]) -> int:
    """Return the nodes with which the job file lets the job start, 1 by default."""
    most = str(spec.get("nnodes", 1)).rpartition(":")[2]
    return int(most) if most.isascii() and most.isdecimal() and int(most) > 0 else 1


def _ranks_per_node(spec: Mapping[str, Any]) -> int:
    """Return the ranks on each node by the job file, 1 by default."""
    value = spec.get("nproc_per_node")
    return value if isinstance(value, int) and value > 0 else 1


def _micros(seconds: float) -> int:
    return round(seconds * SECOND)
