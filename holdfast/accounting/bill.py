"""The bill of one job or of all: the ledger, what it says of ETTR, MTTF and MTTR, and who the losses are to be put down to."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy
from sqlalchemy import func
from sqlmodel import Session, col

from detectors.catalogue import Blame, RecommendedAction
from holdfast.accounting.attribution import settle
from holdfast.accounting.ledger import HOUR, ROLLBACK, SECOND, UNFINISHED, Ledger, Use
from holdfast.accounting.losses import FailureCosts
from holdfast.accounting.lost_capacity import gone_without
from holdfast.accounting.timeline import IncidentSpan
from holdfast.accounting.timeline_reader import KnownJob, TimelineReader, Unit, known, node_moves, unit_of
from holdfast.history.models import FaultRecord, Job
from holdfast.history.statistics import NO_FAULT, USER_ERROR
from holdfast.history.store import History
from policies.node_faults import ENDED

ENOUGH: Final = 2
"""Below so many a mean would be one case."""
OFTEN: Final = 3
"""Incidents a node is blamed for from which on it is worth a test: as many restarts in place as a policy allows it by default."""
ASKS_TO_LEAVE: Final = frozenset({RecommendedAction.RESET_GPU, RecommendedAction.DRAIN, RecommendedAction.EVICT})
HARDWARE: Final = frozenset({Blame.GPU, Blame.NODE})
NO_INCIDENT: Final = "no incident"
"""Cause of steps that were thrown away though no fault was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean, and of how many."""

    seconds: float | None
    """Empty where there are too few."""
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLoss:
    """What one kind of fault cost."""

    kind: str
    incidents: int
    hours: float
    phases: dict[str, float]
    """Phase to hours, the dearest first."""
    without: float = 0.0
    """Hours of ranks that the job went without after such incidents, until they were back: held by nobody, and in no sum of what was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadNode:
    """What a node cost."""

    node: str
    faults: int
    """That were seen on it, or on ranks it held."""
    incidents: int
    """Whose root was there, the script's own errors left out."""
    blamed: int
    """Of these, those that speak against its GPUs or the node itself."""
    hours: float
    """Lost in these incidents, blamed for or not."""
    worst: str
    """The kind of root that cost most."""
    to_quarantine: bool
    """A root asked for it to leave, or it was blamed often: a case for quarantine and a burn-in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBill:
    """One job's part."""

    job: KnownJob
    ledger: Ledger
    figures: FailureCosts
    incidents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The root fault of an incident, as far as the bill needs it."""

    node: str | None
    recommended_action: str
    blame: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What was held, and what became of it."""

    unit: Unit
    since: float | None
    until: float
    jobs: Sequence[JobBill]
    ledger: Ledger
    figures: FailureCosts
    losses: Sequence[FailureLoss]
    """The dearest first."""
    bad_nodes: Sequence[BadNode]
    """The dearest first."""
    mttf: Mean
    mttr: Mean
    user_errors: int
    """Incidents that were the script's fault: no failure of the fleet."""

    @property
    def whole(self) -> float:
        """Return the hours of everything that was held."""
        return self.ledger.sum().hours

    def hours(self, use: Use) -> float:
        """Return the hours of one use."""
        return self.ledger.sum(use).hours

    @property
    def without(self) -> float:
        """Return the hours of ranks that jobs went without while they trained on with fewer."""
        return sum(one.without for one in self.losses)

    @property
    def ettr(self) -> float | None:
        """Return the share of the jobs' time that went into steps that were kept; empty where no step is known, or no time passed."""
        return self.figures.ettr

    @property
    def phases(self) -> dict[str, float]:
        """Return what was lost by phase in hours, the dearest first."""
        found: Counter[str] = Counter()
        for account, amount in self.ledger.losses():
            found[account.phase] += amount.devices
        return {phase: devices / HOUR for phase, devices in found.most_common()}


@dataclass(slots=True)
class _Adding:
    """What is added up job by job."""

    jobs: list[JobBill] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    by_kind: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    incidents: Counter[str] = field(default_factory=Counter)
    """Of each kind."""
    without: Counter[str] = field(default_factory=Counter)
    """Microseconds of ranks that were missing, by kind."""
    faults: Counter[str] = field(default_factory=Counter)
    """On each node."""
    roots: defaultdict[str, list[tuple[str, Root, int]]] = field(default_factory=lambda: defaultdict(list))
    """By node: kind, root and microseconds lost."""
    failures: int = 0
    user_errors: int = 0
    repairs: list[int] = field(default_factory=list)


def bill(history: History, job: Job | None = None, *, since: float | None = None, now: float | None = None) -> Bill:
    """Return the bill of *job*, or of all; of what came after *since* (seconds since 1970) where that is given.

    Jobs that run are counted until *now* (default: this moment).
    """
    at = time.time() if now is None else now
    jobs = known(history, only=None if job is None else [job], since=since, now=at)
    adding = _Adding()
    with history.session() as session:
        unit = unit_of(session, jobs, every=job is None)
        reader = TimelineReader(session=session, unit=unit, since=since, node_moves=node_moves(session, jobs, every=job is None))
        for one in jobs:
            _add(adding, reader, one)
    wall, down = adding.ledger.sum().wall, sum(amount.wall for account, amount in adding.ledger.losses() if account.phase not in _NOT_DOWN)
    return Bill(
        unit=unit,
        since=since,
        until=max((one.end for one in jobs), default=at),
        jobs=sorted(adding.jobs, key=lambda one: -one.ledger.sum().devices),
        ledger=adding.ledger,
        figures=FailureCosts.sum(one.figures for one in adding.jobs),
        losses=_losses(adding),
        bad_nodes=_lemons(adding),
        mttf=_mean((wall - down) / SECOND, adding.failures),
        mttr=_mean(sum(adding.repairs) / SECOND, len(adding.repairs)),
        user_errors=adding.user_errors,
    )


_NOT_DOWN: Final = frozenset({ROLLBACK, UNFINISHED})
"""Losses while the job ran."""


def _add(adding: _Adding, reader: TimelineReader, job: KnownJob) -> None:
    """Settle the accounts of *job* and add what they say."""
    life = reader.life(job)
    since = None if reader.since is None else round(reader.since * SECOND)
    ledger = settle(life, since=since)
    within = [one for one in life.troubles if since is None or one.fault_at >= since]
    roots = _roots(reader.session, job.id) if life.troubles else {}
    adding.jobs.append(JobBill(job=job, ledger=ledger, figures=FailureCosts.of(life, ledger, since=since), incidents=len(within)))
    adding.ledger.take_in(ledger)
    adding.faults.update(_faults(reader.session, job.id, reader.since))
    _add_losses(adding, ledger, life.troubles, roots)
    kinds = {one.id: one.kind for one in life.troubles}
    for incident, devices in gone_without(life, since=since).items():
        adding.without[kinds.get(incident, NO_INCIDENT)] += devices
    for one in within:
        adding.incidents[one.kind] += 1
        users = one.id in roots and roots[one.id].recommended_action == USER_ERROR
        adding.user_errors += users
        if not users and one.outcome not in NO_FAULT:
            adding.failures += 1
            if one.outcome == "recovered":
                adding.repairs.append(one.back_at - one.fault_at)


def _add_losses(adding: _Adding, ledger: Ledger, troubles: Iterable[IncidentSpan], roots: dict[str, Root]) -> None:
    """Put down the losses in *ledger* to kinds of faults, and to nodes."""
    kinds, lost = {one.id: one.kind for one in troubles}, Counter[str]()
    for account, amount in ledger.losses():
        adding.by_kind[kinds.get(account.incident, NO_INCIDENT)][account.phase] += amount.devices
        lost[account.incident] += amount.devices
    for incident, kind in kinds.items():
        root = roots.get(incident)
        if root is not None and root.node and root.recommended_action != USER_ERROR and lost[incident]:
            adding.roots[root.node].append((kind, root, lost[incident]))


def _mean(seconds: float, n: int) -> Mean:
    return Mean(seconds=seconds / n if n >= ENOUGH else None, n=n)


def _losses(adding: _Adding) -> list[FailureLoss]:
    found = [
        FailureLoss(
            kind=kind,
            incidents=adding.incidents[kind],
            hours=adding.by_kind[kind].total() / HOUR,
            phases={phase: devices / HOUR for phase, devices in adding.by_kind[kind].most_common()},
            without=adding.without[kind] / HOUR,
        )
        for kind in adding.by_kind.keys() | adding.incidents.keys() | adding.without.keys()
    ]
    return sorted(found, key=lambda one: (-one.hours, -one.without, one.kind))


def _lemons(adding: _Adding) -> list[BadNode]:
    found = []
    for node in adding.faults.keys() | adding.roots.keys():
        roots = adding.roots.get(node, [])
        blamed = [root for _, root, _ in roots if root.blame in HARDWARE]
        held = [root for kind, root, _ in roots if root.blame in HARDWARE and kind not in ENDED]  # as quarantine itself does
        found.append(
            BadNode(
                node=node,
                faults=adding.faults[node],
                incidents=len(roots),
                blamed=len(blamed),
                hours=sum(devices for *_, devices in roots) / HOUR,
                worst=_dearest(roots),
                to_quarantine=len(held) >= OFTEN or any(root.recommended_action in ASKS_TO_LEAVE for root in held),
            )
        )
    return sorted(found, key=lambda one: (-one.hours, -one.faults, one.node))


def _dearest(roots: Iterable[tuple[str, Root, int]]) -> str:
    """Return the kind that cost most; empty where there is none."""
    by_kind: Counter[str] = Counter()
    for kind, _, devices in roots:
        by_kind[kind] += devices
    return next((kind for kind, _ in by_kind.most_common(1)), "")


def _roots(session: Session, job: str) -> dict[str, Root]:
    """Return the root fault of each of the job's incidents."""
    columns = (col(FaultRecord.incident_id), col(FaultRecord.node), col(FaultRecord.recommended_action), col(FaultRecord.blame))
    wanted = sqlalchemy.select(*columns).where(col(FaultRecord.job_id) == job, col(FaultRecord.root).is_(True), columns[0].is_not(None))
    rows: Iterable[Any] = session.connection().execute(wanted.order_by(col(FaultRecord.id)))
    return {
        incident: Root(node=node, recommended_action=recommended_action, blame=blame) for incident, node, recommended_action, blame in rows
    }


def _faults(session: Session, job: str, since: float | None) -> dict[str, int]:
    """Return how many faults were seen on each node."""
    mine = [col(FaultRecord.job_id) == job, col(FaultRecord.node).is_not(None), *([] if since is None else [col(FaultRecord.at) >= since])]
    wanted = sqlalchemy.select(col(FaultRecord.node), func.count()).where(*mine).group_by(col(FaultRecord.node))
    counted: Iterable[Any] = session.connection().execute(wanted)
    return {node: number for node, number in counted}  # noqa: C416 (rows are no pairs to a type checker)
