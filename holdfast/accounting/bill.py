"""The bill of one job or of all: the ledger, ETTR, MTTF and MTTR, and which faults and nodes caused the losses."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy
from sqlalchemy import func
from sqlmodel import Session, col

from holdfast.accounting.attribution import attribute, lost_capacity
from holdfast.accounting.ledger import HOUR, ROLLBACK, SECOND, UNFINISHED, Ledger, TimeCategory
from holdfast.accounting.losses import FailureCosts
from holdfast.accounting.timeline_reader import KnownJob, TimelineReader, Unit, known_jobs, status_changes, unit_of
from holdfast.detectors.catalogue import HARDWARE_OF_NODE, TAKES_NODE_OUT
from holdfast.history.models import FaultRecord, Job
from holdfast.history.statistics import NO_FAULT, USER_ERROR
from holdfast.history.store import History
from holdfast.policies.nodes.node_faults import ENDED

MIN_SAMPLES: Final = 2
"""With fewer there is no mean."""
MANY_INCIDENTS: Final = 3
"""Incidents attributed to a node after which it should be tested: as many restarts in place as a policy allows by default."""
NO_INCIDENT: Final = "no incident"
"""Cause of steps that were thrown away without an incident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and the number of its samples."""

    seconds: float | None
    """None with too few samples."""
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLoss:
    """What one kind of fault cost."""

    kind: str
    incidents: int
    hours: float
    phases: dict[str, float]
    """Phase to hours, most expensive first."""
    lost_capacity: float = 0.0
    """Hours of ranks missing after such incidents while the job trained at reduced size; nobody held them, so they are in no other sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadNode:
    """A node with faults and what they cost."""

    node: str
    faults: int
    """Seen on it or on its ranks."""
    incidents: int
    """With their root cause on it, without user errors."""
    attributed: int
    """Of these, those attributed to its GPUs or to the node itself."""
    hours: float
    """Lost in all these incidents."""
    worst: str
    """The kind of root cause that cost most."""
    to_quarantine: bool
    """A root cause recommends eviction, or many incidents are attributed to it: quarantine it and run a burn-in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBill:
    """One job's part."""

    job: KnownJob
    ledger: Ledger
    costs: FailureCosts
    incidents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The root cause of an incident, as far as the bill needs it."""

    node: str | None
    recommended_action: str
    attributed_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The time that jobs held nodes for, and what it was used for."""

    unit: Unit
    since: float | None
    until: float
    jobs: Sequence[JobBill]
    ledger: Ledger
    costs: FailureCosts
    losses: Sequence[FailureLoss]
    """Most expensive first."""
    bad_nodes: Sequence[BadNode]
    """Most expensive first."""
    mttf: Mean
    mttr: Mean
    user_errors: int
    """Incidents caused by the script, which are no failures of nodes."""

    @property
    def total_hours(self) -> float:
        """Return the hours of all categories."""
        return self.ledger.sum().hours

    def hours(self, category: TimeCategory) -> float:
        """Return the hours of one category."""
        return self.ledger.sum(category).hours

    @property
    def lost_capacity(self) -> float:
        """Return the hours of missing ranks while jobs trained at reduced size."""
        return sum(one.lost_capacity for one in self.losses)

    @property
    def ettr(self) -> float | None:
        """Return the share of the jobs' time in steps that were kept; None if no step is known or no time passed."""
        return self.costs.ettr

    @property
    def phases(self) -> dict[str, float]:
        """Return the lost hours by phase, most expensive first."""
        found: Counter[str] = Counter()
        for account, amount in self.ledger.losses():
            found[account.phase] += amount.devices
        return {phase: devices / HOUR for phase, devices in found.most_common()}


@dataclass(slots=True)
class _Totals:
    """Sums over jobs."""

    jobs: list[JobBill] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    by_kind: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    incidents: Counter[str] = field(default_factory=Counter)
    """By kind."""
    lost_capacity: Counter[str] = field(default_factory=Counter)
    """Microseconds of missing ranks, by kind."""
    faults: Counter[str] = field(default_factory=Counter)
    """By node."""
    roots: defaultdict[str, list[tuple[str, Root, int]]] = field(default_factory=lambda: defaultdict(list))
    """By node: kind, root cause and microseconds lost."""
    failures: int = 0
    user_errors: int = 0
    repairs: list[int] = field(default_factory=list)


def bill(history: History, job: Job | None = None, *, since: float | None = None, now: float | None = None) -> Bill:
    """Return the bill of *job*, or of all jobs, from *since* on if given (seconds since 1970).

    Live jobs count until *now* (default: the present).
    """
    at = time.time() if now is None else now
    jobs = known_jobs(history, only=None if job is None else [job], since=since, now=at)
    totals = _Totals()
    with history.session() as session:
        unit = unit_of(session, jobs, every=job is None)
        reader = TimelineReader(session=session, unit=unit, since=since, status_changes=status_changes(session, jobs, every=job is None))
        for one in jobs:
            _add(totals, reader, one)
    wall, down = totals.ledger.sum().wall, sum(amount.wall for account, amount in totals.ledger.losses() if account.phase not in _NOT_DOWN)
    return Bill(
        unit=unit,
        since=since,
        until=max((one.end for one in jobs), default=at),
        jobs=sorted(totals.jobs, key=lambda one: -one.ledger.sum().devices),
        ledger=totals.ledger,
        costs=FailureCosts.sum(one.costs for one in totals.jobs),
        losses=_losses(totals),
        bad_nodes=_bad_nodes(totals),
        mttf=_mean((wall - down) / SECOND, totals.failures),
        mttr=_mean(sum(totals.repairs) / SECOND, len(totals.repairs)),
        user_errors=totals.user_errors,
    )


_NOT_DOWN: Final = frozenset({ROLLBACK, UNFINISHED})
"""Losses while the job ran."""


def _add(totals: _Totals, reader: TimelineReader, job: KnownJob) -> None:
    """Attribute the time of *job* and add the results."""
    timeline = reader.read(job)
    since = None if reader.since is None else round(reader.since * SECOND)
    ledger = attribute(timeline, since=since)
    within = [one for one in timeline.incidents if since is None or one.fault_at >= since]
    roots = _roots(reader.session, job.id) if timeline.incidents else {}
    totals.jobs.append(JobBill(job=job, ledger=ledger, costs=FailureCosts.of(timeline, ledger, since=since), incidents=len(within)))
    totals.ledger.add(ledger)
    totals.faults.update(_faults(reader.session, job.id, reader.since))
    kinds, lost = {one.id: one.kind for one in timeline.incidents}, Counter[str]()
    for account, amount in ledger.losses():
        totals.by_kind[kinds.get(account.incident, NO_INCIDENT)][account.phase] += amount.devices
        lost[account.incident] += amount.devices
    for incident, kind in kinds.items():
        root = roots.get(incident)
        if root is not None and root.node and root.recommended_action != USER_ERROR and lost[incident]:
            totals.roots[root.node].append((kind, root, lost[incident]))
    for incident, devices in lost_capacity(timeline, since=since).items():
        totals.lost_capacity[kinds.get(incident, NO_INCIDENT)] += devices
    for one in within:
        totals.incidents[one.kind] += 1
        is_user_error = one.id in roots and roots[one.id].recommended_action == USER_ERROR
        totals.user_errors += is_user_error
        if not is_user_error and one.outcome not in NO_FAULT:
            totals.failures += 1
            if one.outcome == "recovered":
                totals.repairs.append(one.recovered_at - one.fault_at)


def _mean(seconds: float, n: int) -> Mean:
    return Mean(seconds=seconds / n if n >= MIN_SAMPLES else None, n=n)


def _losses(totals: _Totals) -> list[FailureLoss]:
    found = [
        FailureLoss(
            kind=kind,
            incidents=totals.incidents[kind],
            hours=totals.by_kind[kind].total() / HOUR,
            phases={phase: devices / HOUR for phase, devices in totals.by_kind[kind].most_common()},
            lost_capacity=totals.lost_capacity[kind] / HOUR,
        )
        for kind in totals.by_kind.keys() | totals.incidents.keys() | totals.lost_capacity.keys()
    ]
    return sorted(found, key=lambda one: (-one.hours, -one.lost_capacity, one.kind))


def _bad_nodes(totals: _Totals) -> list[BadNode]:
    found = []
    for node in totals.faults.keys() | totals.roots.keys():
        roots = totals.roots.get(node, [])
        attributed = [(kind, root) for kind, root, _ in roots if root.attributed_to in HARDWARE_OF_NODE]
        counted = [root for kind, root in attributed if kind not in ENDED]  # the same ones as quarantine counts
        by_kind: Counter[str] = Counter()
        for kind, _, devices in roots:
            by_kind[kind] += devices
        found.append(
            BadNode(
                node=node,
                faults=totals.faults[node],
                incidents=len(roots),
                attributed=len(attributed),
                hours=sum(devices for *_, devices in roots) / HOUR,
                worst=next((kind for kind, _ in by_kind.most_common(1)), ""),
                to_quarantine=len(counted) >= MANY_INCIDENTS or any(root.recommended_action in TAKES_NODE_OUT for root in counted),
            )
        )
    return sorted(found, key=lambda one: (-one.hours, -one.faults, one.node))


def _roots(session: Session, job: str) -> dict[str, Root]:
    """Return the root cause of each of the job's incidents."""
    columns = (col(FaultRecord.incident_id), col(FaultRecord.node), col(FaultRecord.recommended_action), col(FaultRecord.attributed_to))
    wanted = sqlalchemy.select(*columns).where(col(FaultRecord.job_id) == job, col(FaultRecord.root).is_(True), columns[0].is_not(None))
    rows: Iterable[Any] = session.connection().execute(wanted.order_by(col(FaultRecord.id)))
    return {
        incident: Root(node=node, recommended_action=action, attributed_to=attributed_to) for incident, node, action, attributed_to in rows
    }


def _faults(session: Session, job: str, since: float | None) -> dict[str, int]:
    """Return the number of faults on each node."""
    mine = [col(FaultRecord.job_id) == job, col(FaultRecord.node).is_not(None), *([] if since is None else [col(FaultRecord.at) >= since])]
    wanted = sqlalchemy.select(col(FaultRecord.node), func.count()).where(*mine).group_by(col(FaultRecord.node))
    counted: Iterable[Any] = session.connection().execute(wanted)
    return {node: number for node, number in counted}  # noqa: C416 (rows are no pairs to a type checker)
