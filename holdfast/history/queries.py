"""Queries of the history. Every function takes the history first and returns rows that stay readable after its session."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, and_, func, or_
from sqlalchemy.orm import aliased
from sqlmodel import SQLModel, col, select

from holdfast.errors import UnknownIncident, UnknownJob
from holdfast.history.models import (
    Checkpoint,
    DecisionRecord,
    FaultRecord,
    Generation,
    Incident,
    IncidentDiagnosis,
    Job,
    JobEvent,
    JobTransition,
    NodeStatusChange,
    Phase,
    Request,
    Snapshots,
    StepRecord,
    StragglerDecision,
)
from holdfast.history.store import History

MOST_GENERATIONS: Final = 500
"""The newest generations in which `ranks_held` searches."""
MOST_CONDITIONS: Final = 200
"""Conditions that one query joins by `or`: SQLite parses no deeper expression than 1000."""
TERMINAL: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
"""States that a job never leaves; in any other state, known or not, the job is live."""

Row = TypeVar("Row", bound=SQLModel)


def jobs(history: History, name: str | None = None, *, limit: int | None = 50) -> list[Job]:
    """Return the newest jobs, newest first; only those called *name* when given."""
    return _rows(history, Job, *([] if name is None else [col(Job.name) == name]), newest_first=True, limit=limit)


def newest_job(history: History, name: str) -> Job:
    """Return the newest job called *name*; raise `UnknownJob` with similar names."""
    found = jobs(history, name, limit=1)
    if found:
        return found[0]
    with history.session() as session:
        names = list(session.exec(select(Job.name).group_by(Job.name).order_by(func.max(col(Job.id)).desc())))
    raise UnknownJob(name, tuple(difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:5]))


def live_job(history: History, name: str) -> Job | None:
    """Return the newest live job called *name*."""
    return next((job for job in jobs(history, name, limit=None) if not has_ended(history, job.id)), None)


def has_ended(history: History, job_id: str) -> bool:
    """Return whether the job is in a terminal state."""
    state = state_of(history, job_id)
    return state is not None and state.after in TERMINAL


def state_of(history: History, job_id: str) -> JobTransition | None:
    """Return the newest transition of the job: its `after` is the state. None before the first."""
    return _newest(history, JobTransition, col(JobTransition.job_id) == job_id)


def states_of(history: History, job_ids: Collection[str]) -> dict[str, JobTransition]:
    """Return the newest transition of each of these jobs, as `state_of` does; jobs without any are missing."""
    newest = select(func.max(col(JobTransition.id))).where(col(JobTransition.job_id).in_(job_ids)).group_by(col(JobTransition.job_id))
    return {one.job_id: one for one in _rows(history, JobTransition, col(JobTransition.id).in_(newest))}


def transitions(history: History, job_id: str) -> list[JobTransition]:
    """Return the job's transitions in order."""
    return _rows(history, JobTransition, col(JobTransition.job_id) == job_id)


def generations(history: History, job_id: str) -> list[Generation]:
    """Return the job's generations by number."""
    return _rows(history, Generation, col(Generation.job_id) == job_id, order=col(Generation.number))


def newest_generation(history: History, job_id: str) -> Generation | None:
    """Return the job's generation with the greatest number."""
    return _newest(history, Generation, col(Generation.job_id) == job_id, order=col(Generation.number))


def ranks_held(history: History, job_id: str) -> dict[str, set[int]]:
    """Return the ranks that each node has held in the newest generations of a job, nodes of the newest generation first."""
    found: dict[str, set[int]] = {}
    query = select(Generation.ranks).where(Generation.job_id == job_id).order_by(col(Generation.number).desc()).limit(MOST_GENERATIONS)
    with history.session() as session:
        for ranks in session.exec(query.execution_options(yield_per=16)):  # each is large if there are thousands of nodes
            for node, some in ranks.items():
                found.setdefault(node, set()).update(some)
    return found


def faulty_nodes(history: History, job_id: str, *, limit: int) -> list[str]:
    """Return up to *limit* nodes with faults of a job, those with the newest fault first."""
    newest = func.max(col(FaultRecord.id))
    query = (
        select(FaultRecord.node)
        .where(FaultRecord.job_id == job_id, col(FaultRecord.node).is_not(None))
        .group_by(col(FaultRecord.node))
        .order_by(newest.desc())
    )
    with history.session() as session:
        return [node for node in session.exec(query.limit(limit)) if node is not None]


def incidents(history: History, job_id: str) -> list[Incident]:
    """Return the job's incidents by number."""
    return _rows(history, Incident, col(Incident.job_id) == job_id, order=col(Incident.number))


def incident(history: History, ref: str | int, job: str | None = None) -> Incident:
    """Return the incident that *ref* names: a number within *job* (default: the newest job), an id, or a unique prefix of an id."""
    wanted = str(ref).strip().lower()
    of_job = [] if job is None else [col(Incident.job_id) == newest_job(history, job).id]
    found: list[Incident] = []
    if wanted.isascii() and wanted.isdigit() and len(wanted) < 10:  # noqa: PLR2004 (a longer one is an id's beginning, not a number)
        of_any = of_job or [col(Incident.job_id) == one.id for one in jobs(history, limit=1)]
        found = _rows(history, Incident, col(Incident.number) == int(wanted), *of_any) if of_any else []
    if not found and wanted.isascii() and wanted.isalnum():
        found = _rows(history, Incident, col(Incident.id).startswith(wanted), *of_job, limit=2)
    if len(found) != 1:
        raise UnknownIncident(str(ref))
    return found[0]


def open_incident(history: History, job_id: str) -> Incident | None:
    """Return the job's newest incident that is not closed."""
    return _newest(history, Incident, col(Incident.job_id) == job_id, col(Incident.closed_at).is_(None))


def faults(history: History, job_id: str | None = None, *, incident_id: str | None = None) -> list[FaultRecord]:
    """Return the faults of a job, or of one incident, in the order they were recorded."""
    return _rows(history, FaultRecord, *_of(FaultRecord, job_id, incident_id))


def faults_of_kinds(history: History, kinds: Collection[str]) -> list[FaultRecord]:
    """Return the faults of these *kinds* in all jobs, in the order they were recorded."""
    return _rows(history, FaultRecord, col(FaultRecord.kind).in_(kinds))


def faults_of_hardware(history: History, cluster: str, *, since: float, but: str, limit: int = 2000) -> list[FaultRecord]:
    """Return the root causes attributed to GPUs and nodes of *cluster* since a time, in all jobs *but* one, oldest first.

    At most *limit* of them, the newest.
    """
    of_cluster = select(Job.id).where(col(Job.cluster)["name"].as_string() == cluster, col(Job.id) != but)
    where = (
        col(FaultRecord.job_id).in_(of_cluster),
        col(FaultRecord.root).is_(True),
        col(FaultRecord.at) >= since,
        col(FaultRecord.attributed_to).in_(("gpu", "node")),
        col(FaultRecord.node).is_not(None),
    )
    return _rows(history, FaultRecord, *where, newest_first=True, limit=limit)[::-1]


def fault_in_other_jobs(history: History, cluster: str, kind: str, *, since: float, but: str) -> bool:
    """Return whether a job of *cluster* other than *but* has had a fault of that kind since then."""
    of_cluster = select(Job.id).where(col(Job.cluster)["name"].as_string() == cluster, col(Job.id) != but)
    return bool(
        _rows(
            history,
            FaultRecord,
            col(FaultRecord.kind) == kind,
            col(FaultRecord.at) >= since,
            col(FaultRecord.job_id).in_(of_cluster),
            limit=1,
        )
    )


def newest_fault(history: History, job_id: str, kinds: Collection[str]) -> FaultRecord | None:
    """Return the job's newest fault of one of these *kinds*."""
    return _newest(history, FaultRecord, col(FaultRecord.job_id) == job_id, col(FaultRecord.kind).in_(kinds))


def faults_within(history: History, job_id: str, generation: int, kinds: Collection[str]) -> list[FaultRecord]:
    """Return the faults of these *kinds* in one generation of the job, in the order they were recorded."""
    return _rows(
        history, FaultRecord, col(FaultRecord.job_id) == job_id, col(FaultRecord.generation) == generation, col(FaultRecord.kind).in_(kinds)
    )


def diagnoses(history: History, job_id: str | None = None, *, incident_id: str | None = None) -> list[IncidentDiagnosis]:
    """Return the diagnoses of a job's incidents, or of one incident, in the order they were made."""
    return _rows(history, IncidentDiagnosis, *_of(IncidentDiagnosis, job_id, incident_id))


def decisions(history: History, job_id: str | None = None, *, incident_id: str | None = None) -> list[DecisionRecord]:
    """Return the decisions of a job, or of one incident, in the order they were made."""
    return _rows(history, DecisionRecord, *_of(DecisionRecord, job_id, incident_id))


def phases(history: History, incident_id: str | None = None, *, job_id: str | None = None) -> list[Phase]:
    """Return the phases of one incident, or of all incidents of a job, those of each incident in their order."""
    found = _rows(history, Phase, *_of(Phase, job_id, incident_id))
    return sorted(found, key=lambda phase: (phase.incident_id, phase.position))


def steps(history: History, job_id: str, *, after: float | None = None, generation: int | None = None) -> list[StepRecord]:
    """Return every reported step, including those lost to a rollback, by generation and number.

    With *after*, only those reported since then; with *generation*, only those of that one.
    """
    only = [] if after is None else [col(StepRecord.at) > after]
    only += [] if generation is None else [col(StepRecord.generation) == generation]
    with history.session() as session:
        found = session.exec(
            select(StepRecord).where(col(StepRecord.job_id) == job_id, *only).order_by(col(StepRecord.generation), col(StepRecord.step))
        )
        return list(found)


def curve(history: History, job_id: str) -> list[StepRecord]:
    """Return one row per step, by number: that of the newest generation that computed it."""
    newest = (
        select(col(StepRecord.step).label("step"), func.max(col(StepRecord.generation)).label("generation"))
        .where(col(StepRecord.job_id) == job_id)
        .group_by(col(StepRecord.step))
        .subquery()
    )
    both = and_(col(StepRecord.step) == newest.c.step, col(StepRecord.generation) == newest.c.generation)
    with history.session() as session:
        return list(
            session.exec(select(StepRecord).join(newest, both).where(col(StepRecord.job_id) == job_id).order_by(col(StepRecord.step)))
        )


def last_step(history: History, job_id: str) -> StepRecord | None:
    """Return the greatest step of the newest generation that reported one: the job's progress."""
    query = (
        select(StepRecord)
        .where(col(StepRecord.job_id) == job_id)
        .order_by(col(StepRecord.generation).desc(), col(StepRecord.step).desc())
        .limit(1)
    )
    with history.session() as session:
        return session.exec(query).first()


def last_steps(history: History, job_ids: Collection[str]) -> dict[str, StepRecord]:
    """Return the last step of each of these jobs, as `last_step` does; jobs without any are missing."""
    inner = aliased(StepRecord)
    order = (col(inner.generation).desc(), col(inner.step).desc())
    of_job = col(inner.job_id) == col(Job.id)
    generation, step = (
        select(column).where(of_job).order_by(*order).limit(1).correlate(Job).scalar_subquery()
        for column in (col(inner.generation), col(inner.step))
    )
    query = (
        select(StepRecord)
        .join(Job, col(StepRecord.job_id) == col(Job.id))
        .where(col(Job.id).in_(job_ids), col(StepRecord.generation) == generation, col(StepRecord.step) == step)
    )
    with history.session() as session:
        return {one.job_id: one for one in session.exec(query)}


def steps_after(history: History, after: Mapping[str, float]) -> dict[str, list[StepRecord]]:
    """Return the steps of several jobs, each of those reported after its time in *after*, by generation and number."""
    only = [and_(col(StepRecord.job_id) == job, col(StepRecord.at) > at) for job, at in after.items()]
    found = dict[str, list[StepRecord]]()
    order = (col(StepRecord.generation), col(StepRecord.step))
    with history.session() as session:
        for begin in range(0, len(only), MOST_CONDITIONS):
            some = or_(*only[begin : begin + MOST_CONDITIONS])
            for one in session.exec(select(StepRecord).where(some).order_by(*order)):
                found.setdefault(one.job_id, []).append(one)
    return found


def by_job(
    history: History,
    model: type[Row],
    job_ids: Collection[str],
    *where: ColumnElement[bool],
    order: Any = None,  # noqa: ANN401 (a column, whose Python type SQLModel hides)
) -> dict[str, list[Row]]:
    """Return the rows of several jobs that meet the conditions, by job, each job's by *order* (default: by id)."""
    found: dict[str, list[Row]] = {job: [] for job in job_ids}
    of_jobs = col(model.job_id).in_(job_ids)  # type: ignore[attr-defined]
    for row in _rows(history, model, of_jobs, *where, order=order):
        found[row.job_id].append(row)  # type: ignore[attr-defined]
    return found


def node_statuses(history: History, cluster: str) -> dict[str, NodeStatusChange]:
    """Return each node's newest status, by node name; nodes without any are missing."""
    newest = select(func.max(col(NodeStatusChange.id))).where(col(NodeStatusChange.cluster) == cluster).group_by(col(NodeStatusChange.node))
    return {
        one.node: one for one in _rows(history, NodeStatusChange, col(NodeStatusChange.id).in_(newest), order=col(NodeStatusChange.node))
    }


def checkpoints(history: History, job_id: str) -> list[Checkpoint]:
    """Return the job's checkpoints and problems with them, in the order they were recorded."""
    return _rows(history, Checkpoint, col(Checkpoint.job_id) == job_id)


def checkpoints_at(history: History, paths: Collection[str]) -> list[Checkpoint]:
    """Return what any job recorded of the checkpoints at these *paths*, oldest first: jobs of the same name share their folder."""
    return _rows(history, Checkpoint, col(Checkpoint.path).in_(paths), order=col(Checkpoint.at))


def snapshots(history: History, job_id: str) -> list[Snapshots]:
    """Return the records of the job's in-memory snapshots, one row per generation that reported any."""
    return _rows(history, Snapshots, col(Snapshots.job_id) == job_id, order=col(Snapshots.generation))


def newest_snapshots(history: History, job_id: str) -> Snapshots | None:
    """Return the record of the newest generation that reported in-memory snapshots."""
    return _newest(history, Snapshots, col(Snapshots.job_id) == job_id, order=col(Snapshots.generation))


def pending_requests(history: History, job_id: str) -> list[Request]:
    """Return the requests to the job that are not handled yet, oldest first."""
    return _rows(history, Request, col(Request.job_id) == job_id, col(Request.handled_at).is_(None))


def request(history: History, request_id: str) -> Request | None:
    """Return the request with that id."""
    with history.session() as session:
        return session.get(Request, request_id)


def job_events(history: History, job_id: str) -> list[JobEvent]:
    """Return the job's events in order."""
    return _rows(history, JobEvent, col(JobEvent.job_id) == job_id)


def straggler_decisions(history: History, job_id: str) -> list[StragglerDecision]:
    """Return the decisions about straggling ranks of a job, in order."""
    of_job = select(StragglerDecision).where(col(StragglerDecision.job_id) == job_id)
    with history.session() as session:
        return list(session.exec(of_job.order_by(col(StragglerDecision.at), col(StragglerDecision.id))))


def finished_migrations(history: History, job_id: str) -> list[Request]:
    """Return the handled migration requests of a job, in the order in which they finished."""
    where = (col(Request.job_id) == job_id, col(Request.kind) == "migrate", col(Request.handled_at).is_not(None))
    return _rows(history, Request, *where, order=col(Request.handled_at))


def _of(model: type[Any], job_id: str | None, incident_id: str | None) -> list[ColumnElement[bool]]:
    """Return the conditions for the rows of a job, of an incident, or of both."""
    assert job_id is not None or incident_id is not None, "name a job or an incident"
    wanted = {"job_id": job_id, "incident_id": incident_id}
    return [col(getattr(model, name)) == value for name, value in wanted.items() if value is not None]


def _newest(history: History, model: type[Row], *where: ColumnElement[bool], order: Any = None) -> Row | None:  # noqa: ANN401 (as below)
    """Return the last row by *order* (default: by id, which increases even when the clock is set back)."""
    found = _rows(history, model, *where, order=order, newest_first=True, limit=1)
    return found[0] if found else None


def _rows(
    history: History,
    model: type[Row],
    *where: ColumnElement[bool],
    order: Any = None,  # noqa: ANN401 (a column, whose Python type SQLModel hides)
    newest_first: bool = False,
    limit: int | None = None,
) -> list[Row]:
    """Return the rows by *order* (default: by id)."""
    by = col(model.id) if order is None else order  # type: ignore[attr-defined]
    query = select(model).where(*where).order_by(by.desc() if newest_first else by).limit(limit)
    with history.session() as session:
        return list(session.exec(query))
