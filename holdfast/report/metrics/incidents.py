"""Incidents and faults of each job, over all its runs.

Counters are made so that `rate()` and `increase()` are correct:

- They are counted from the history at each scrape, so that a restart of `holdfast admin metrics` resets none.
- Each series of a counter exists, at 0, from the first scrape of a job on. Prometheus does not count the step from "no series" to 1: a
  series that appears with its first event loses that event. Counters therefore have only labels with few and known values.
- There are more than 600 kinds. Values by kind are therefore gauges: how many so far, and when the newest happened, which also shows the
  first one: ``time() - holdfast_last_fault_timestamp_seconds{kind="..."} < 3600``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from sqlalchemy import func
from sqlmodel import Session, col

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import Area, RecommendedAction
from holdfast.history.models import FaultRecord, Incident, Phase
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.report.metrics.jobs import JOB, JobMetrics, add_counts, columns, counter_per_job, gauge_per_job
from holdfast.report.phases import KINDS

BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Seconds: in-process recoveries take hundredths, those that wait for a node minutes."""
OUTCOMES: Final = ("recovered", "passed", "stopped", "failed")
NO_ACTION: Final = "none"
"""The recovery action of an incident that closed before one was chosen."""
OTHER: Final = "other"
"""The area of a fault kind that this version's catalogue does not have."""


def incidents(session: Session, jobs: Sequence[JobMetrics]) -> list[Metric]:
    """Return how many incidents each job had, how they ended, and what they cost."""
    closed = CounterMetricFamily(
        "holdfast_incidents_total", "Closed incidents, by area of the root cause and by outcome.", labels=["job", "area", "outcome"]
    )
    actions = CounterMetricFamily(
        "holdfast_recovery_actions_total", "Closed incidents, by the last recovery action that was taken.", labels=["job", "action"]
    )
    by_kind = GaugeMetricFamily("holdfast_incidents_by_kind", "Closed incidents so far, by kind of the root cause.", labels=["job", "kind"])
    newest = GaugeMetricFamily(
        "holdfast_last_incident_timestamp_seconds",
        "When the newest closed incident of this kind, recovery action and outcome began, in seconds since 1970.",
        labels=["job", "kind", "action", "outcome"],
    )
    is_open = gauge_per_job("holdfast_incidents_open", "Open incidents.")
    lost = counter_per_job("holdfast_lost_steps_total", "Steps that incidents rolled back, and that were computed again.")
    down = HistogramMetricFamily("holdfast_recovery_seconds", "Time from a fault to the first new step, of closed incidents.", labels=JOB)
    phases = SummaryMetricFamily(
        "holdfast_downtime_seconds", "Time of recoveries by phase; rollback is what the lost steps had taken.", labels=["job", "phase"]
    )
    for one in jobs:
        name = one.job.name
        wanted = columns(Incident, one, "kind", "action", "outcome", "fault_at", "closed_at", "downtime_s", "steps_lost")
        rows: Any = session.connection().execute(wanted).all()
        closed_rows = [row for row in rows if row.closed_at is not None]
        areas = {area: Counter(row.outcome or OTHER for row in closed_rows if area_of(row.kind) == area) for area in (*Area, OTHER)}
        for area, outcomes in areas.items():
            if area != OTHER or outcomes:
                add_counts(closed, [name, area], outcomes, OUTCOMES)
        add_counts(actions, [name], Counter(row.action or NO_ACTION for row in closed_rows), (*RecoveryAction, NO_ACTION))
        for kind, times in sorted(Counter(row.kind for row in closed_rows).items()):
            by_kind.add_metric([name, kind], times)
        last: dict[tuple[str, str, str], float] = defaultdict(float)
        for row in closed_rows:
            labels = (row.kind, row.action or NO_ACTION, row.outcome or OTHER)
            last[labels] = max(last[labels], row.fault_at)
        for (kind, action, outcome), at in sorted(last.items()):
            newest.add_metric([name, kind, action, outcome], at)
        is_open.add_metric([name], len(rows) - len(closed_rows))
        lost.add_metric([name], sum(row.steps_lost or 0 for row in rows))
        add_histogram(down, [name], [row.downtime_s for row in closed_rows if row.downtime_s is not None], BUCKETS)
        for phase, seconds in _by_phase(session, one).items():
            phases.add_metric([name, phase], len(seconds), math.fsum(seconds))
    return [closed, actions, by_kind, newest, is_open, lost, down, phases]


def faults(session: Session, jobs: Sequence[JobMetrics]) -> list[Metric]:
    """Return the number of faults of each job, and when the newest happened."""
    total = CounterMetricFamily(
        "holdfast_faults_total",
        "Faults seen, by recommended action, whether they opened an incident or not.",
        labels=["job", "recommended_action"],
    )
    by_kind = GaugeMetricFamily("holdfast_faults_by_kind", "Faults seen so far, by kind.", labels=["job", "kind"])
    newest = GaugeMetricFamily(
        "holdfast_last_fault_timestamp_seconds",
        "When the newest fault of this kind was seen, in seconds since 1970.",
        labels=["job", "kind"],
    )
    for one in jobs:
        name = one.job.name
        wanted = columns(FaultRecord, one, "kind", "recommended_action").add_columns(func.count(), func.max(col(FaultRecord.at)))
        actions, kinds, last = Counter[str](), Counter[str](), defaultdict[str, float](float)
        for kind, action, times, at in session.connection().execute(
            wanted.group_by(col(FaultRecord.kind), col(FaultRecord.recommended_action))
        ):
            actions[action] += times
            kinds[kind] += times
            last[kind] = max(last[kind], at)
        add_counts(total, [name], actions, RecommendedAction)
        for kind in sorted(kinds):
            by_kind.add_metric([name, kind], kinds[kind])
            newest.add_metric([name, kind], last[kind])
    return [total, by_kind, newest]


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], values: Sequence[float], bounds: Sequence[float]) -> None:
    """Add a histogram of *values*: how many are at most as large as each of *bounds*."""
    ordered = sorted(values)
    buckets = [(f"{bound:g}", bisect_right(ordered, bound)) for bound in bounds]
    family.add_metric(labels, [*buckets, ("+Inf", len(ordered))], math.fsum(ordered))


def area_of(kind: str) -> str:
    """Return the area of a fault kind."""
    entry = CATALOGUE.get(kind)
    return OTHER if entry is None else entry.area


def _by_phase(session: Session, one: JobMetrics) -> dict[str, list[float]]:
    """Return the seconds of each phase, known phases first, also those that no recovery had."""
    found: dict[str, list[float]] = {kind.name: [] for kind in KINDS}
    for name, seconds in session.connection().execute(columns(Phase, one, "name", "seconds")):
        found.setdefault(name, []).append(seconds)
    return found
