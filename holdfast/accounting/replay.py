"""Replay recorded decisions with another policy, and price each difference by what recoveries took in this history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

import sqlalchemy
import sqlmodel
from sqlalchemy import func
from sqlmodel import Session, col

import holdfast.detectors.all_kinds  # noqa: F401 (registers every kind in the catalogue: cases name them)
from holdfast.detectors.codec import MalformedData, unpacked
from holdfast.errors import UnknownOptionValue
from holdfast.history.models import DecidedCase, DecisionRecord, Generation, Incident, Job, Phase, StragglerDecision
from holdfast.history.store import History
from holdfast.policies.recovery.case_codec import UnreadableCase, act_of, from_record
from holdfast.policies.recovery.escalation import Decision as Made
from holdfast.policies.recovery.escalation import RecoveryAction
from holdfast.policies.recovery.policy import NAMED, Policy
from holdfast.policies.slowness import MigrateStraggler, StragglerCase
from holdfast.spec import TrainingJob
from holdfast.spec.job import is_policy_file
from holdfast.spec.policy import load_policy, under_job

NOT_KEPT: Final = "it was made before cases were recorded"
STRAGGLER_UNREADABLE: Final = "the case of a straggler decision cannot be read"


class ActionCost(NamedTuple):
    """What recoveries by one action took, from the fault until the job was back at its step."""

    seconds: float
    """Median, including the rollback."""
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first decision of an incident that the other policy would have made differently."""

    job: str
    job_id: str
    incident: int
    kind: str
    at: float
    decided: str
    """The recorded action."""
    decided_act: Mapping[str, Any]
    """Nodes removed and added, if any."""
    decided_reason: str
    would: Made
    rule: str
    passed_over: Mapping[str, str]
    hours: float | None
    """Compute-hours that would have been saved, negative if lost; None if unknown."""
    why_not: str
    """Why it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerReplay:
    """A decision about a straggling rank, and that of the other policy."""

    job: str
    at: float
    rank: int
    node: str
    decided: str
    decided_reason: str
    would: str
    """Empty if the record cannot be read."""
    reason: str

    @property
    def differs(self) -> bool:
        """Return whether the other policy decides differently."""
        return bool(self.would) and self.would != self.decided


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReplay:
    """The result of replaying with *policy*."""

    policy: str
    incidents: int
    decisions: int
    same: int
    follow: int
    """Later decisions of an incident with a difference, which cannot be replayed."""
    unreadable: Mapping[str, int]
    """Why decisions cannot be replayed, and how many."""
    differences: Sequence[Difference]
    costs: Mapping[str, ActionCost]
    """By action."""
    straggler_decisions: int = 0
    """Decisions about straggling ranks."""
    slow: Sequence[StragglerReplay] = ()
    """Those that differ."""

    @property
    def saved(self) -> float:
        """Return the compute-hours saved by all differences with a price."""
        return sum(one.hours for one in self.differences if one.hours is not None)

    @property
    def unpriced(self) -> int:
        """Return how many differences have no price."""
        return sum(one.hours is None for one in self.differences)


def policy_called(name: str) -> Policy:
    """Return the policy called *name*, or that of the policy file *name*; raise `UnknownOptionValue` with similar names, or `BadFile`."""
    if is_policy_file(name):
        return load_policy(name)
    if name not in NAMED:
        raise UnknownOptionValue("policy", name, tuple(NAMED))
    return NAMED[name]


def _for_job(session: Session, policy: Policy, job_id: str) -> Policy:
    """Return *policy* with the job's own budget and timeouts, if this version can read its job file."""
    job = session.get(Job, job_id)
    try:
        return under_job(policy, TrainingJob.model_validate(job.spec)) if job is not None else policy
    except ValueError:
        return policy


def replay(history: History, name: str, *, job: Job | None = None, since: float | None = None) -> PolicyReplay:
    """Replay all recorded decisions, of *job* or since *since* (seconds since 1970) if given, with the policy called *name*."""
    policy, policies = policy_called(name), dict[str, Policy]()
    differences, unreadable = list[Difference](), defaultdict[str, int](int)
    incidents, decisions, same, follow, diverged = set[str](), 0, 0, 0, set[str]()
    with history.session() as session, history.session() as lookups:
        pricing = _Pricing(lookups)
        for row in _recorded(session, job, since):
            decisions += 1
            if row.job_id not in policies:
                policies[row.job_id] = _for_job(lookups, policy, row.job_id)
            incidents.add(row.incident_id)
            if row.incident_id in diverged:
                follow += 1
                continue
            try:
                if row.record is None:
                    raise UnreadableCase(NOT_KEPT)  # noqa: TRY301 (one place counts them all)
                answer = policies[row.job_id].decide(from_record(row.record))
            except UnreadableCase as error:
                unreadable[str(error)] += 1
                continue
            if row.action == answer.decision.action and _effect(row.act) == _effect(act_of(answer.decision)):
                same += 1
                continue
            diverged.add(row.incident_id)
            hours, why_not = pricing.difference(row, answer.decision.action)
            differences.append(
                Difference(
                    job=row.name,
                    job_id=row.job_id,
                    incident=row.number,
                    kind=row.kind,
                    at=row.at,
                    decided=row.action,
                    decided_act=_effect(row.act),
                    decided_reason=row.reason,
                    would=answer.decision,
                    rule=answer.rule,
                    passed_over=answer.passed_over,
                    hours=hours,
                    why_not=why_not,
                )
            )
        costs = pricing.costs
        stragglers = list(_stragglers(lookups, policy.stragglers, job=job, since=since))
    unread = sum(not one.would for one in stragglers)
    return PolicyReplay(
        policy=name,
        incidents=len(incidents),
        decisions=decisions,
        same=same,
        follow=follow,
        unreadable={**unreadable, **({STRAGGLER_UNREADABLE: unread} if unread else {})},
        differences=differences,
        costs=costs,
        straggler_decisions=len(stragglers),
        slow=[one for one in stragglers if one.differs],
    )


def _effect(act: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a decision does, without the policy's name and notes."""
    return {name: value for name, value in act.items() if value and name not in {"policy", "noted"}}


def _recorded(session: Session, job: Job | None, since: float | None) -> Iterator[Any]:
    """Yield the decisions with their cases, in order."""
    columns = (
        DecisionRecord.id, DecisionRecord.incident_id, DecisionRecord.job_id, DecisionRecord.at, DecisionRecord.action,
        DecisionRecord.reason, DecisionRecord.act,
        Incident.number, Incident.kind, Incident.outcome, Incident.generation_before, Job.name, DecidedCase.record,
    )  # fmt: skip
    wanted = (
        sqlalchemy.select(*map(col, columns))
        .join(Incident, col(Incident.id) == col(DecisionRecord.incident_id))
        .join(Job, col(Job.id) == col(DecisionRecord.job_id))
        .outerjoin(DecidedCase, col(DecidedCase.decision_id) == col(DecisionRecord.id))
        .order_by(col(DecisionRecord.id))
    )
    if job is not None:
        wanted = wanted.where(col(DecisionRecord.job_id) == job.id)
    if since is not None:
        wanted = wanted.where(col(DecisionRecord.at) >= since)
    yield from session.connection().execute(wanted, execution_options={"yield_per": 500})


@dataclass(slots=True)
class _Pricing:
    """What recoveries took, by action; read for the first difference."""

    session: Session
    _costs: dict[str, ActionCost] | None = None

    @property
    def costs(self) -> dict[str, ActionCost]:
        """Return the median of each action over all recoveries with a single decision."""
        if self._costs is None:
            seconds_by_action = defaultdict[str, list[float]](list)
            for action, seconds in self.session.connection().execute(_single_recoveries()):
                seconds_by_action[action].append(seconds)
            self._costs = {action: ActionCost(median(found), len(found)) for action, found in seconds_by_action.items()}
        return self._costs

    def difference(self, row: Any, action: RecoveryAction) -> tuple[float | None, str]:  # noqa: ANN401 (a row of several tables)
        """Return the compute-hours that *action* would have saved in the incident of *row*, or None and why that is unknown."""
        if RecoveryAction.FAIL in {action, row.action}:
            return None, "one ends the job, the other does not"
        if action == row.action:
            return None, "the same action, on other nodes"
        if row.outcome != "recovered":
            return None, f"the incident {'is open' if row.outcome is None else 'did not end in a recovery'}"
        if action not in self.costs:
            return None, f"no recovery by {action} is recorded"
        took: Any = self.session.exec(sqlmodel.select(func.sum(Phase.seconds)).where(col(Phase.incident_id) == row.incident_id)).one()
        width = self.session.exec(
            sqlmodel.select(Generation.world_size).where(
                col(Generation.job_id) == row.job_id, col(Generation.number) == row.generation_before
            )
        ).first()
        if took is None or not width:
            return None, "the duration of the incident is not recorded"
        return (took - self.costs[action].seconds) * width / 3600, ""


def _single_recoveries() -> Any:  # noqa: ANN401 (SQLAlchemy's own type)
    """Return the query for the duration of each recovery by action, of those with a single decision: others used several actions."""
    once = sqlalchemy.select(col(DecisionRecord.incident_id)).group_by(col(DecisionRecord.incident_id)).having(func.count() == 1)
    took = (
        sqlalchemy.select(col(Phase.incident_id).label("incident"), func.sum(Phase.seconds).label("seconds"))
        .group_by(col(Phase.incident_id))
        .subquery()
    )
    return (
        sqlalchemy.select(col(Incident.action), took.c.seconds)
        .join(took, took.c.incident == col(Incident.id))
        .where(col(Incident.outcome) == "recovered", col(Incident.action).is_not(None), col(Incident.id).in_(once))
    )


def _stragglers(session: Session, rule: MigrateStraggler, *, job: Job | None, since: float | None) -> Iterator[StragglerReplay]:
    """Yield what *rule* decides for all recorded straggling ranks."""
    of = StragglerDecision
    columns = (Job.name, of.at, of.rank, of.node, of.act, of.reason, of.record)
    wanted = sqlalchemy.select(*map(col, columns)).join(Job, col(Job.id) == col(of.job_id)).order_by(col(of.at))
    if job is not None:
        wanted = wanted.where(col(of.job_id) == job.id)
    if since is not None:
        wanted = wanted.where(col(of.at) >= since)
    for row in session.connection().execute(wanted):
        name, at, rank, node, act, reason, record = tuple(row)
        try:
            again = rule(unpacked(StragglerCase, record))
            would, why = str(again.act), again.reason
        except MalformedData:  # of a newer version, or corrupt
            would, why = "", STRAGGLER_UNREADABLE
        yield StragglerReplay(job=name, at=at, rank=rank, node=node, decided=act, decided_reason=reason, would=would, reason=why)
