"""State, progress, controller, checkpoints and goodput of each job. Gauges are of its newest run, counters of all its runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy
from sqlalchemy import func
from sqlmodel import Session, col, select

from detectors.all_kinds import CATALOGUE
from holdfast.accounting.bill import Bill, bill
from holdfast.accounting.ledger import SECOND, Use
from holdfast.history import queries
from holdfast.history.lease import LEASE_SECONDS, holder_of
from holdfast.history.models import Checkpoint, Job, Lease, Move
from holdfast.history.store import History
from holdfast.report.metrics.exposition import MetricFamily
from policies.states import State

SHOWN_SECONDS: Final = 7 * 86400.0
"""A job has metrics for so long after its end: names that nobody uses any more would stay for ever."""
PROBLEMS: Final = tuple(kind.id for kind in CATALOGUE.values() if (kind.component, kind.source) == ("checkpoint", "worker's report"))
"""The kinds that a rank reports of checkpoints and snapshots."""
SHARE: Final = 0.02
"""Of a scraper's time, at most, that may go into settling a job's accounts: every step of it is read for that."""
LEAST_SECONDS: Final = 10.0
"""For which settled accounts are good in any case."""


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """A job name that has metrics: its newest run, its state, since when it is in it, and the ids of all its runs."""

    job: Job
    state: str
    since: float
    runs: Sequence[str]

    @property
    def ended(self) -> bool:
        """Tell whether nothing can follow."""
        return self.state in queries.TERMINAL

    @property
    def suspended(self) -> bool:
        """Tell whether it holds no nodes, and needs no controller, until somebody resumes it."""
        return self.state == State.SUSPENDED


class Accounts:
    """The accounts of jobs, settled anew no oftener than they are worth it; those of a job that has ended, once."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, bool, Bill]] = {}

    def of(self, history: History, shown: JobMetrics) -> Bill:
        """Return the accounts of the newest run."""
        until, final, found = self._kept.get(shown.job.id, (0.0, False, None))
        if found is not None and (final or time.monotonic() < until):
            return found
        begin = time.monotonic()
        fresh = bill(history, shown.job)
        took = time.monotonic() - begin
        self._kept[shown.job.id] = (time.monotonic() + max(LEAST_SECONDS, took / SHARE), shown.ended, fresh)
        return fresh

    def forget_but(self, ids: Iterable[str]) -> None:
        """Let go of the accounts of all other jobs."""
        wanted = set(ids)
        self._kept = {job: kept for job, kept in self._kept.items() if job in wanted}


def shown(history: History, *, now: float) -> list[JobMetrics]:
    """Return the jobs that have metrics: by name, those whose newest run has not ended, or not long ago."""
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
            found.append(JobMetrics(job, state, at, [one.id for one in runs[name]]))
    return found


def progress(history: History, jobs: Sequence[JobMetrics]) -> list[MetricFamily]:
    """Return the state of each job and how far it is."""
    info = MetricFamily("holdfast_job_info", "gauge", "The newest run of a job: its id, and the cluster it runs on.")
    states = MetricFamily("holdfast_job_state", "gauge", "1 for the state that the job is in, 0 for every other.")
    since = MetricFamily("holdfast_job_state_timestamp_seconds", "gauge", "When the job entered its present state, in seconds since 1970.")
    generation = MetricFamily("holdfast_job_generation", "gauge", "Number of the present generation; it grows with every recovery.")
    ranks = MetricFamily("holdfast_job_ranks", "gauge", "Ranks of the present generation.")
    full = MetricFamily("holdfast_job_full_ranks", "gauge", "Ranks of the job at its full size.")
    step = MetricFamily("holdfast_job_step", "gauge", "Newest completed step.")
    target = MetricFamily("holdfast_job_target_step", "gauge", "Step at which the script says it will end.")
    stepped = MetricFamily("holdfast_job_step_timestamp_seconds", "gauge", "When the newest step was completed, in seconds since 1970.")
    duration = MetricFamily("holdfast_job_step_duration_seconds", "gauge", "Duration of the newest step.")
    loss = MetricFamily("holdfast_job_loss", "gauge", "Loss of the newest step.")
    submitted = MetricFamily(
        "holdfast_job_submitted_timestamp_seconds", "gauge", "When the newest run was submitted, in seconds since 1970."
    )
    for one in jobs:
        name, newest = one.job.name, queries.newest_generation(history, one.job.id)
        info.add(1, job=name, run=one.job.id, cluster=str(one.job.cluster.get("name", "")))
        submitted.add(one.job.at, job=name)
        since.add(one.since, job=name)
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
    return [info, states, since, submitted, generation, ranks, full, step, target, stepped, duration, loss]


def controllers(history: History, jobs: Sequence[JobMetrics]) -> list[MetricFamily]:
    """Return whether each job that needs a controller has one."""
    controlled = MetricFamily(
        "holdfast_job_has_controller",
        "gauge",
        "1 while a flow holds the job's lease, 0 while none does; not of suspended or ended jobs.",
    )
    epoch = MetricFamily("holdfast_job_lease_epoch", "gauge", "How often the lease of the newest run has changed hands.")
    renewed = MetricFamily(
        "holdfast_job_lease_renewed_timestamp_seconds", "gauge", "When its holder last renewed the lease, in seconds since 1970."
    )
    for one in [one for one in jobs if not one.ended and not one.suspended]:
        controlled.add(holder_of(history, one.job.id) is not None, job=one.job.name)
        with history.session() as session:
            lease = session.get(Lease, one.job.id)
        if lease is not None:
            epoch.add(lease.epoch, job=one.job.name)
            renewed.add(max(0.0, lease.expires_at - LEASE_SECONDS), job=one.job.name)
    return [controlled, epoch, renewed]


def columns(model: Any, one: JobMetrics, *names: str) -> sqlalchemy.Select[Any]:  # noqa: ANN401 (a table)
    """Return a query for these columns of the rows of all runs of a job."""
    return sqlalchemy.select(*(col(getattr(model, name)) for name in names)).where(col(model.job_id).in_(one.runs))


def checkpoints(history: History, session: Session, jobs: Sequence[JobMetrics]) -> list[MetricFamily]:
    """Return each job's checkpoints and in-memory snapshots, and what they cost."""
    saved = MetricFamily("holdfast_checkpoints_total", "counter", "Complete checkpoints that were written.")
    problems = MetricFamily("holdfast_checkpoint_problems_total", "counter", "Problems with checkpoints and in-memory snapshots, by kind.")
    stood = MetricFamily("holdfast_checkpoint_stall_seconds_total", "counter", "Seconds for which training stopped for saves.")
    beside = MetricFamily("holdfast_checkpoint_write_seconds_total", "counter", "Seconds of writing checkpoints while training went on.")
    size = MetricFamily("holdfast_checkpoint_size_bytes", "gauge", "Size of the newest checkpoint.")
    step = MetricFamily("holdfast_checkpoint_step", "gauge", "Step of the newest checkpoint.")
    at = MetricFamily("holdfast_checkpoint_timestamp_seconds", "gauge", "When the newest checkpoint was completed, in seconds since 1970.")
    old = MetricFamily("holdfast_snapshot_age_steps", "gauge", "Steps completed since the newest complete in-memory snapshot.")
    cost = MetricFamily("holdfast_snapshot_cost_ratio", "gauge", "Share of the training time that in-memory snapshots cost, 0 to 1.")
    overlapped = MetricFamily(
        "holdfast_snapshot_overlapped_ratio", "gauge", "Share of the copying that took place while training waited anyway, 0 to 1."
    )
    bytes_of = MetricFamily("holdfast_snapshot_size_bytes", "gauge", "Size of one in-memory snapshot of all ranks.")
    for one in jobs:
        name = one.job.name
        rows: Any = session.connection().execute(
            columns(Checkpoint, one, "trouble")
            .add_columns(func.count(), func.sum(Checkpoint.seconds), func.sum(Checkpoint.beside))
            .group_by(col(Checkpoint.trouble))
        )
        by_kind = {kind: (times, seconds or 0.0, written or 0.0) for kind, times, seconds, written in rows}
        times, seconds, written = by_kind.pop(None, (0, 0.0, 0.0))
        saved.add(times, job=name)
        stood.add(seconds, job=name)
        beside.add(written, job=name)
        problems.count({kind: count for kind, (count, *_) in by_kind.items()}, PROBLEMS, "kind", job=name)
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
            overlapped.add(memory.hidden, job=name)
            bytes_of.add(memory.size, job=name)
    return [saved, problems, stood, beside, size, step, at, old, cost, overlapped, bytes_of]


def goodput(history: History, jobs: Sequence[JobMetrics], kept: Accounts) -> list[MetricFamily]:
    """Return how each job's newest run spent its time, as `holdfast cost` shows it."""
    ettr = MetricFamily(
        "holdfast_job_effective_training_time_ratio",
        "gauge",
        "Share of the time since the submission in steps that were kept (ETTR), 0 to 1.",
    )
    spent = MetricFamily(
        "holdfast_job_time_seconds", "gauge", "Rank-seconds (node-seconds where ranks are not known) that the job held, by category."
    )
    for one in jobs:
        found = kept.of(history, one)
        ettr.add(found.ettr, job=one.job.name)
        for use in Use:
            spent.add(found.ledger.sum(use).devices / SECOND, job=one.job.name, category=use.value.replace(" ", "_"))
    kept.forget_but(one.job.id for one in jobs)
    return [ettr, spent]
