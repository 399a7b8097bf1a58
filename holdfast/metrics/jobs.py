"""What is told of each job: where it stands, what befell it, what became of its time."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy
from sqlalchemy import func
from sqlmodel import Session, col, select

from holdfast.accounting.bill import Bill, bill
from holdfast.accounting.ledger import SECOND, Use
from holdfast.history import queries
from holdfast.history.lease import LEASE_SECONDS, holder_of
from holdfast.history.models import Checkpoint, Fault, Incident, Job, Lease, Move, Phase
from holdfast.history.store import History
from holdfast.metrics.exposition import Family
from policies.states import State

SHOWN_SECONDS: Final = 7 * 86400.0
"""A job is told of for so long after its end: names that nobody uses any more would stay for ever."""
BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Seconds; recoveries in place take some hundredths, those that wait for a node minutes."""
SHARE: Final = 0.02
"""Of a scraper's time, at most, that may go into settling a job's accounts: every step of it is read for that."""
LEAST_SECONDS: Final = 10.0
"""For which settled accounts are good in any case."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A job name that is told of: its newest run, its state, and the ids of all its runs."""

    job: Job
    state: str
    runs: Sequence[str]

    @property
    def ended(self) -> bool:
        """Tell whether nothing can follow."""
        return self.state in queries.TERMINAL


class Accounts:
    """The accounts of jobs, settled anew no oftener than they are worth it; those of a job that has ended, once."""

    def __init__(self, clock: Any = time.monotonic) -> None:  # noqa: ANN401 (a function that tells the time)
        self._clock = clock
        self._kept: dict[str, tuple[float, bool, Bill]] = {}

    def of(self, history: History, shown: Shown) -> Bill:
        """Return the accounts of the newest run."""
        until, final, found = self._kept.get(shown.job.id, (0.0, False, None))
        if found is not None and (final or self._clock() < until):
            return found
        begin = self._clock()
        fresh = bill(history, shown.job)
        took = self._clock() - begin
        self._kept[shown.job.id] = (self._clock() + max(LEAST_SECONDS, took / SHARE), shown.ended, fresh)
        return fresh

    def forget_but(self, ids: Iterable[str]) -> None:
        """Let go of the accounts of all other jobs."""
        wanted = set(ids)
        self._kept = {job: kept for job, kept in self._kept.items() if job in wanted}


def shown(history: History, *, now: float) -> list[Shown]:
    """Return the jobs that are told of: by name, those whose newest run has not ended, or not long ago."""
    newest = select(func.max(col(Move.id))).group_by(col(Move.job_id))
    with history.session() as session:
        last = {
            job: (after, at) for job, after, at in session.exec(select(Move.job_id, Move.after, Move.at).where(col(Move.id).in_(newest)))
        }
        runs: dict[str, list[Job]] = defaultdict(list)
        for job in session.exec(select(Job).order_by(col(Job.id))):
            runs[job.name].append(job)
    found = []
    for name in sorted(runs):
        job = runs[name][-1]
        state, at = last.get(job.id, (str(State.LAUNCHING), job.at))
        if state not in queries.TERMINAL or now - at < SHOWN_SECONDS:
            found.append(Shown(job, state, [one.id for one in runs[name]]))
    return found


def standing(history: History, jobs: Sequence[Shown]) -> list[Family]:
    """Return where each job stands."""
    info = Family("holdfast_job_info", "gauge", "The newest run of a job: its id, and the cluster it runs on.")
    states = Family("holdfast_job_state", "gauge", "1 for the state that the job is in, 0 for every other.")
    generation = Family("holdfast_job_generation", "gauge", "Number of the present membership; it grows with every recovery.")
    ranks = Family("holdfast_job_ranks", "gauge", "Ranks of the present membership.")
    full = Family("holdfast_job_full_ranks", "gauge", "Ranks at the job's full width.")
    step = Family("holdfast_job_step", "gauge", "Newest step that is done.")
    target = Family("holdfast_job_target_step", "gauge", "Step at which the script says it will end.")
    stepped = Family("holdfast_job_step_timestamp_seconds", "gauge", "When the newest step was done, in seconds since 1970.")
    duration = Family("holdfast_job_step_duration_seconds", "gauge", "What the newest step took.")
    loss = Family("holdfast_job_loss", "gauge", "Loss that the newest step told.")
    submitted = Family("holdfast_job_submitted_timestamp_seconds", "gauge", "When the newest run was submitted, in seconds since 1970.")
    for one in jobs:
        name, newest = one.job.name, queries.newest_generation(history, one.job.id)
        info.add(1, job=name, run=one.job.id, cluster=str(one.job.cluster.get("name", "")))
        submitted.add(one.job.at, job=name)
        for state in State:
            states.add(one.state == state, job=name, state=state.lower())
        if newest is not None:
            generation.add(newest.number, job=name)
            ranks.add(newest.world_size, job=name)
            full.add((newest.facts or {}).get("width") or newest.world_size, job=name)
            target.add(newest.until, job=name)
        last = queries.last_step(history, one.job.id)
        if last is not None:
            step.add(last.step, job=name)
            stepped.add(last.at, job=name)
            duration.add(last.seconds, job=name)
            loss.add(last.loss, job=name)
    return [info, states, submitted, generation, ranks, full, step, target, stepped, duration, loss]


def steering(history: History, jobs: Sequence[Shown]) -> list[Family]:
    """Return who steers each job that has not ended."""
    steered = Family("holdfast_job_steered", "gauge", "1 while a flow holds the job's lease; 0 where a live job trains on without one.")
    epoch = Family("holdfast_job_lease_epoch", "gauge", "How often the lease of the newest run has changed hands.")
    renewed = Family(
        "holdfast_job_lease_renewed_timestamp_seconds", "gauge", "When its holder last renewed the lease, in seconds since 1970."
    )
    for one in [one for one in jobs if not one.ended]:
        steered.add(holder_of(history, one.job.id) is not None, job=one.job.name)
        with history.session() as session:
            lease = session.get(Lease, one.job.id)
        if lease is not None:
            epoch.add(lease.epoch, job=one.job.name)
            renewed.add(max(0.0, lease.expires_at - LEASE_SECONDS), job=one.job.name)
    return [steered, epoch, renewed]


def troubles(session: Session, jobs: Sequence[Shown]) -> list[Family]:
    """Return what befell each job, over all its runs."""
    closed = Family(
        "holdfast_incidents_total", "counter", "Incidents that are over, by kind of root fault, rung that answered and outcome."
    )
    still = Family("holdfast_incidents_open", "gauge", "Incidents that are not over.")
    lost = Family("holdfast_lost_steps_total", "counter", "Steps that incidents took back, and that had to be computed again.")
    down = Family("holdfast_recovery_seconds", "histogram", "From a fault to the first new step, of incidents that are over.")
    phases = Family("holdfast_downtime_seconds", "histogram", "Time of recoveries by phase; rollback is what the lost steps had taken.")
    faults = Family("holdfast_faults_total", "counter", "Faults seen, by kind and level, whether they opened an incident or not.")
    for one in jobs:
        name = one.job.name
        rows: Any = (
            session.connection().execute(_columns(Incident, one, "kind", "rung", "outcome", "closed_at", "downtime_s", "steps_lost")).all()
        )
        counted = Counter((row.kind, row.rung or "none", row.outcome or "none") for row in rows if row.closed_at is not None)
        for (kind, rung, outcome), times in sorted(counted.items()):
            closed.add(times, job=name, kind=kind, rung=rung, outcome=outcome)
        still.add(sum(row.closed_at is None for row in rows), job=name)
        lost.add(sum(row.steps_lost or 0 for row in rows), job=name)
        down.observe([row.downtime_s for row in rows if row.closed_at is not None and row.downtime_s is not None], BUCKETS, job=name)
        for phase, seconds in sorted(_by_phase(session, one).items()):
            phases.observe(seconds, BUCKETS, job=name, phase=phase)
        wanted = _columns(Fault, one, "kind", "level").add_columns(func.count()).group_by(col(Fault.kind), col(Fault.level))
        for kind, level, times in sorted(session.connection().execute(wanted).all()):
            faults.add(times, job=name, kind=kind, level=level)
    return [closed, still, lost, down, phases, faults]


def _columns(model: Any, one: Shown, *names: str) -> sqlalchemy.Select[Any]:  # noqa: ANN401 (a table)
    return sqlalchemy.select(*(col(getattr(model, name)) for name in names)).where(col(model.job_id).in_(one.runs))


def _by_phase(session: Session, one: Shown) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, seconds in session.connection().execute(_columns(Phase, one, "name", "seconds")):
        found[name].append(seconds)
    return found


def keeping(history: History, session: Session, jobs: Sequence[Shown]) -> list[Family]:
    """Return what checkpoints and snapshots are there, and what they cost."""
    saved = Family("holdfast_checkpoints_total", "counter", "Whole checkpoints that were put in place.")
    wrong = Family("holdfast_checkpoint_troubles_total", "counter", "Troubles with checkpoints, by kind.")
    stood = Family("holdfast_checkpoint_stall_seconds_total", "counter", "Seconds for which training stood for saves.")
    beside = Family("holdfast_checkpoint_write_seconds_total", "counter", "Seconds of writing checkpoints while training went on.")
    size = Family("holdfast_checkpoint_size_bytes", "gauge", "Size of the newest checkpoint.")
    step = Family("holdfast_checkpoint_step", "gauge", "Step of the newest checkpoint.")
    at = Family("holdfast_checkpoint_timestamp_seconds", "gauge", "When the newest checkpoint was put in place, in seconds since 1970.")
    old = Family("holdfast_snapshot_age_steps", "gauge", "Steps done since the newest snapshot that is whole in the memory of nodes.")
    cost = Family("holdfast_snapshot_cost_ratio", "gauge", "Share of the training time that snapshots in memory cost, 0 to 1.")
    hidden = Family("holdfast_snapshot_hidden_ratio", "gauge", "Share of the copying that took place while training waited anyway, 0 to 1.")
    bytes_of = Family("holdfast_snapshot_size_bytes", "gauge", "Size of one snapshot of all ranks.")
    for one in jobs:
        name = one.job.name
        rows: Any = session.connection().execute(
            _columns(Checkpoint, one, "trouble")
            .add_columns(func.count(), func.sum(Checkpoint.seconds), func.sum(Checkpoint.beside))
            .group_by(col(Checkpoint.trouble))
        )
        by_trouble = {trouble: (times, seconds or 0.0, written or 0.0) for trouble, times, seconds, written in rows}
        times, seconds, written = by_trouble.pop(None, (0, 0.0, 0.0))
        saved.add(times, job=name)
        stood.add(seconds, job=name)
        beside.add(written, job=name)
        for trouble, (count, *_) in sorted(by_trouble.items()):
            wrong.add(count, job=name, kind=trouble)
        wanted = select(Checkpoint).where(col(Checkpoint.job_id) == one.job.id, col(Checkpoint.trouble).is_(None))
        newest = session.exec(wanted.order_by(col(Checkpoint.id).desc()).limit(1)).first()
        if newest is not None:
            size.add(newest.size, job=name)
            step.add(newest.step, job=name)
            at.add(newest.at, job=name)
        memory = queries.newest_snapshots(history, one.job.id)
        if memory is not None:
            old.add(memory.age_steps, job=name)
            cost.add(memory.cost, job=name)
            hidden.add(memory.hidden, job=name)
            bytes_of.add(memory.size, job=name)
    return [saved, wrong, stood, beside, size, step, at, old, cost, hidden, bytes_of]


def accounts(history: History, jobs: Sequence[Shown], kept: Accounts) -> list[Family]:
    """Return what became of the time of each job's newest run, as `holdfast cost` tells it."""
    ettr = Family(
        "holdfast_job_effective_training_time_ratio",
        "gauge",
        "Share of the time since the submission in steps that were kept (ETTR), 0 to 1.",
    )
    held = Family("holdfast_job_held_seconds", "gauge", "Rank-seconds (node-seconds where ranks are not known) that the job held, by use.")
    for one in jobs:
        found = kept.of(history, one)
        ettr.add(found.ettr, job=one.job.name)
        for use in Use:
            held.add(found.ledger.sum(use).devices / SECOND, job=one.job.name, use=use.value.replace(" ", "_"))
    kept.forget_but(one.job.id for one in jobs)
    return [ettr, held]
