"""State, progress, controller, checkpoints and goodput of each job. Gauges are of its newest run, counters of all its runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import sqlalchemy
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from sqlalchemy import func
from sqlmodel import Session, col, select

from holdfast.accounting.bill import Bill, bill
from holdfast.accounting.ledger import SECOND, TimeCategory
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.history import queries
from holdfast.history.lease import LEASE_SECONDS, holder_of
from holdfast.history.models import Checkpoint, Job, JobTransition, Lease
from holdfast.history.store import History
from holdfast.policies.states import State

JOB: Final = ("job",)
"""The labels of a metric that has one series for each job."""
gauge_per_job, counter_per_job = partial(GaugeMetricFamily, labels=JOB), partial(CounterMetricFamily, labels=JOB)
SHOWN_SECONDS: Final = 7 * 86400.0
"""A job has metrics for so long after its end, so that unused names disappear."""
PROBLEMS: Final = tuple(kind.id for kind in CATALOGUE.values() if (kind.component, kind.source) == ("checkpoint", "worker's report"))
"""The kinds that a rank reports of checkpoints and snapshots."""
BILL_SHARE: Final = 0.02
"""Share of the time that may at most be spent on a job's bill, for which every step is read."""
BILL_SECONDS: Final = 10.0
"""For which a bill stays valid at least."""


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """A job name with metrics: its newest run, its state and since when, and the ids of all its runs."""

    job: Job
    state: str
    since: float
    runs: Sequence[str]

    @property
    def ended(self) -> bool:
        """Return whether the newest run is in a terminal state."""
        return self.state in queries.TERMINAL

    @property
    def suspended(self) -> bool:
        """Return whether it is suspended: it holds no nodes and needs no controller."""
        return self.state == State.SUSPENDED


class Bills:
    """The bills of jobs, computed again only as often as their cost allows; those of ended jobs only once."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, bool, Bill]] = {}

    def of(self, history: History, shown: JobMetrics) -> Bill:
        """Return the bill of the newest run."""
        until, final, found = self._kept.get(shown.job.id, (0.0, False, None))
        if found is not None and (final or time.monotonic() < until):
            return found
        begin = time.monotonic()
        fresh = bill(history, shown.job)
        took = time.monotonic() - begin
        self._kept[shown.job.id] = (time.monotonic() + max(BILL_SECONDS, took / BILL_SHARE), shown.ended, fresh)
        return fresh

    def keep_only(self, ids: Iterable[str]) -> None:
        """Drop the bills of all other jobs."""
        wanted = set(ids)
        self._kept = {job: kept for job, kept in self._kept.items() if job in wanted}


def shown(history: History, *, now: float) -> list[JobMetrics]:
    """Return the jobs with metrics, by name: those whose newest run is live or ended recently."""
    newest = select(func.max(col(JobTransition.id))).group_by(col(JobTransition.job_id))
    with history.session() as session:
        last = {
            job: (after, at)
            for job, after, at in session.exec(
                select(JobTransition.job_id, JobTransition.after, JobTransition.at).where(col(JobTransition.id).in_(newest))
            )
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


def progress(history: History, jobs: Sequence[JobMetrics]) -> list[Metric]:
    """Return the state of each job and how far it is."""
    info = GaugeMetricFamily(
        "holdfast_job_info", "The newest run of a job: its id, and the cluster it runs on.", labels=["job", "run", "cluster"]
    )
    states = GaugeMetricFamily("holdfast_job_state", "1 for the state that the job is in, 0 for every other.", labels=["job", "state"])
    since = gauge_per_job("holdfast_job_state_timestamp_seconds", "When the job entered its present state, in seconds since 1970.")
    generation = gauge_per_job("holdfast_job_generation", "Number of the present generation; it grows with every recovery.")
    ranks = gauge_per_job("holdfast_job_ranks", "Ranks of the present generation.")
    full = gauge_per_job("holdfast_job_full_ranks", "Ranks of the job at its full size.")
    step = gauge_per_job("holdfast_job_step", "Newest completed step.")
    target = gauge_per_job("holdfast_job_target_step", "Step at which the script says it will end.")
    stepped = gauge_per_job("holdfast_job_step_timestamp_seconds", "When the newest step was completed, in seconds since 1970.")
    duration = gauge_per_job("holdfast_job_step_duration_seconds", "Duration of the newest step.")
    loss = gauge_per_job("holdfast_job_loss", "Loss of the newest step.")
    submitted = gauge_per_job("holdfast_job_submitted_timestamp_seconds", "When the newest run was submitted, in seconds since 1970.")
    for one in jobs:
        name, newest = one.job.name, queries.newest_generation(history, one.job.id)
        info.add_metric([name, one.job.id, str(one.job.cluster.get("name", ""))], 1)
        submitted.add_metric([name], one.job.at)
        since.add_metric([name], one.since)
        for state in State:
            states.add_metric([name, state.lower()], one.state == state)
        if newest is not None:
            generation.add_metric([name], newest.number)
            ranks.add_metric([name], newest.world_size)
            full.add_metric([name], (newest.facts or {}).get("width") or newest.world_size)
            add_known(target, [name], newest.until)
        last = queries.last_step(history, one.job.id)
        if last is not None:
            step.add_metric([name], last.step)
            stepped.add_metric([name], last.at)
            duration.add_metric([name], last.seconds)
            add_known(loss, [name], last.loss)
    return [info, states, since, submitted, generation, ranks, full, step, target, stepped, duration, loss]


def add_known(family: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    """Add a sample; nothing for an unknown value."""
    if value is not None:
        family.add_metric(labels, value)


def add_counts(family: CounterMetricFamily, labels: Sequence[str], found: Mapping[str, float], known: Iterable[str]) -> None:
    """Add a counter for each of the *known* values of the last label, at 0 if none was *found*, and for all other found values.

    `increase()` does not count the step from "no series" to 1: a counter must exist at 0 before its first event.
    """
    for value in dict.fromkeys((*known, *sorted(found))):
        family.add_metric([*labels, value], found.get(value, 0))


def controllers(history: History, jobs: Sequence[JobMetrics]) -> list[Metric]:
    """Return whether each job that needs a controller has one."""
    controlled = gauge_per_job(
        "holdfast_job_has_controller", "1 while a controller holds the job's lease, 0 while none does; not of suspended or ended jobs."
    )
    epoch = gauge_per_job("holdfast_job_lease_epoch", "How often the lease of the newest run has changed hands.")
    renewed = gauge_per_job(
        "holdfast_job_lease_renewed_timestamp_seconds", "When its holder last renewed the lease, in seconds since 1970."
    )
    for one in [one for one in jobs if not one.ended and not one.suspended]:
        controlled.add_metric([one.job.name], holder_of(history, one.job.id) is not None)
        with history.session() as session:
            lease = session.get(Lease, one.job.id)
        if lease is not None:
            epoch.add_metric([one.job.name], lease.epoch)
            renewed.add_metric([one.job.name], max(0.0, lease.expires_at - LEASE_SECONDS))
    return [controlled, epoch, renewed]


def columns(model: Any, one: JobMetrics, *names: str) -> sqlalchemy.Select[Any]:  # noqa: ANN401 (a table)
    """Return a query for these columns of the rows of all runs of a job."""
    return sqlalchemy.select(*(col(getattr(model, name)) for name in names)).where(col(model.job_id).in_(one.runs))


def checkpoints(history: History, session: Session, jobs: Sequence[JobMetrics]) -> list[Metric]:
    """Return each job's checkpoints and in-memory snapshots, and what they cost."""
    saved = counter_per_job("holdfast_checkpoints_total", "Complete checkpoints that were written.")
    problems = CounterMetricFamily(
        "holdfast_checkpoint_problems_total", "Problems with checkpoints and in-memory snapshots, by kind.", labels=["job", "kind"]
    )
    stalled = counter_per_job("holdfast_checkpoint_stall_seconds_total", "Seconds for which training stopped for saves.")
    overlapped_writes = counter_per_job("holdfast_checkpoint_write_seconds_total", "Seconds of writing checkpoints while training went on.")
    size = gauge_per_job("holdfast_checkpoint_size_bytes", "Size of the newest checkpoint.")
    step = gauge_per_job("holdfast_checkpoint_step", "Step of the newest checkpoint.")
    at = gauge_per_job("holdfast_checkpoint_timestamp_seconds", "When the newest checkpoint was completed, in seconds since 1970.")
    old = gauge_per_job("holdfast_snapshot_age_steps", "Steps completed since the newest complete in-memory snapshot.")
    cost = gauge_per_job("holdfast_snapshot_cost_ratio", "Share of the training time that in-memory snapshots cost, 0 to 1.")
    overlapped = gauge_per_job(
        "holdfast_snapshot_overlapped_ratio", "Share of the copying that took place while training waited anyway, 0 to 1."
    )
    bytes_of = gauge_per_job("holdfast_snapshot_size_bytes", "Size of one in-memory snapshot of all ranks.")
    for one in jobs:
        name = one.job.name
        rows: Any = session.connection().execute(
            columns(Checkpoint, one, "problem")
            .add_columns(func.count(), func.sum(Checkpoint.seconds), func.sum(Checkpoint.overlapped_s))
            .group_by(col(Checkpoint.problem))
        )
        by_kind = {kind: (times, seconds or 0.0, written or 0.0) for kind, times, seconds, written in rows}
        times, seconds, written = by_kind.pop(None, (0, 0.0, 0.0))
        saved.add_metric([name], times)
        stalled.add_metric([name], seconds)
        overlapped_writes.add_metric([name], written)
        add_counts(problems, [name], {kind: count for kind, (count, *_) in by_kind.items()}, PROBLEMS)
        wanted = select(Checkpoint).where(col(Checkpoint.job_id) == one.job.id, col(Checkpoint.problem).is_(None))
        newest = session.exec(wanted.order_by(col(Checkpoint.id).desc()).limit(1)).first()
        if newest is not None:
            add_known(size, [name], newest.size)
            add_known(step, [name], newest.step)
            at.add_metric([name], newest.at)
        memory = queries.newest_snapshots(history, one.job.id)
        if memory is not None:
            add_known(old, [name], memory.age_steps)
            add_known(cost, [name], memory.cost)
            add_known(overlapped, [name], memory.overlapped)
            add_known(bytes_of, [name], memory.size)
    return [saved, problems, stalled, overlapped_writes, size, step, at, old, cost, overlapped, bytes_of]


def goodput(history: History, jobs: Sequence[JobMetrics], bills: Bills) -> list[Metric]:
    """Return how each job's newest run spent its time, as `holdfast cost` shows it."""
    ettr = gauge_per_job(
        "holdfast_job_effective_training_time_ratio", "Share of the time since the submission in steps that were kept (ETTR), 0 to 1."
    )
    spent = GaugeMetricFamily(
        "holdfast_job_time_seconds",
        "Rank-seconds (node-seconds where ranks are not known) that the job held, by category.",
        labels=["job", "category"],
    )
    for one in jobs:
        found = bills.of(history, one)
        add_known(ettr, [one.job.name], found.ettr)
        for use in TimeCategory:
            spent.add_metric([one.job.name, use.value.replace(" ", "_")], found.ledger.sum(use).devices / SECOND)
    bills.keep_only(one.job.id for one in jobs)
    return [ettr, spent]
