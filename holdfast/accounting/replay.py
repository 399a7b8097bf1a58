"""Ask another policy what was asked of the one in force then, and price the difference by what recoveries took in this history."""

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

import detectors.all_kinds  # noqa: F401 (enters every kind into the catalogue: cases name them)
from holdfast.accounting.straggler_replay import NO_CASE, ReweighedStraggler, weighed_again
from holdfast.errors import UnknownOptionValue
from holdfast.history.models import DecidedCase, DecisionRecord, Generation, Incident, Job, Phase
from holdfast.history.store import History
from holdfast.spec import TrainingJob
from holdfast.spec.job import is_policy_file
from holdfast.spec.load_policy import load_policy, under_job
from policies.case_codec import UnreadableCase, act_of, from_record
from policies.escalation import Decision as Made
from policies.escalation import RecoveryAction
from policies.policy import NAMED, Policy

NOT_KEPT: Final = "it was made before cases were kept"


class ActionCost(NamedTuple):
    """What recoveries by one action took, from the fault to where the job had been."""

    seconds: float
    """Median, the rollback included."""
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A decision that another policy would have made otherwise: the first of its incident."""

    job: str
    job_id: str
    incident: int
    kind: str
    at: float
    decided: str
    """The action on record."""
    decided_act: Mapping[str, Any]
    """Who left and came, where that is more than nothing."""
    decided_reason: str
    would: Made
    rule: str
    passed_over: Mapping[str, str]
    hours: float | None
    """Compute-hours that would have been won, or lost where it is negative; empty where nobody can tell."""
    why_not: str
    """Why nobody can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReplay:
    """What came of asking *policy*."""

    policy: str
    incidents: int
    decisions: int
    same: int
    follow: int
    """Decisions of an incident that had gone another way before: they were never asked."""
    unreadable: Mapping[str, int]
    """Why a decision cannot be made again, and how many."""
    differences: Sequence[Difference]
    costs: Mapping[str, ActionCost]
    """By action."""
    straggler_decisions: int = 0
    """Decisions about slow ranks."""
    slow: Sequence[ReweighedStraggler] = ()
    """Those of them that would have been others."""

    @property
    def won(self) -> float:
        """Return the compute-hours of all differences that can be priced."""
        return sum(one.hours for one in self.differences if one.hours is not None)

    @property
    def unpriced(self) -> int:
        """Return how many differences cannot be."""
        return sum(one.hours is None for one in self.differences)


def policy_called(name: str) -> Policy:
    """Return the policy that *name* or the file of that name stands for; raise `UnknownOptionValue` with the nearest, or `BadFile`."""
    if is_policy_file(name):
        return load_policy(name)
    if name not in NAMED:
        raise UnknownOptionValue("policy", name, tuple(NAMED))
    return NAMED[name]


def _for_job(session: Session, policy: Policy, job_id: str) -> Policy:
    """Return *policy* under what that job says itself of budget and deadlines, as far as this version can read it."""
    job = session.get(Job, job_id)
    try:
        return under_job(policy, TrainingJob.model_validate(job.spec)) if job is not None else policy
    except ValueError:
        return policy


def replay(history: History, name: str, *, job: Job | None = None, since: float | None = None) -> PolicyReplay:
    """Ask the policy called *name* about all decisions on record, of *job* or since *since* (seconds since 1970) where given."""
    policy, policies = policy_called(name), dict[str, Policy]()
    differences, unreadable = list[Difference](), defaultdict[str, int](int)
    incidents, decisions, same, follow, parted = set[str](), 0, 0, 0, set[str]()
    with history.session() as session, history.session() as beside:
        pricing = _Pricing(beside)
        for row in _asked(session, job, since):
            decisions += 1
            if row.job_id not in policies:
                policies[row.job_id] = _for_job(beside, policy, row.job_id)
            incidents.add(row.incident_id)
            if row.incident_id in parted:
                follow += 1
                continue
            try:
                if row.record is None:
                    raise UnreadableCase(NOT_KEPT)  # noqa: TRY301 (one place counts them all)
                answer = policies[row.job_id].decide(from_record(row.record))
            except UnreadableCase as error:
                unreadable[str(error)] += 1
                continue
            if row.action == answer.decision.action and _said(row.act) == _said(act_of(answer.decision)):
                same += 1
                continue
            parted.add(row.incident_id)
            hours, why_not = pricing.difference(row, answer.decision.action)
            differences.append(
                Difference(
                    job=row.name,
                    job_id=row.job_id,
                    incident=row.number,
                    kind=row.kind,
                    at=row.at,
                    decided=row.action,
                    decided_act=_said(row.act),
                    decided_reason=row.reason,
                    would=answer.decision,
                    rule=answer.rule,
                    passed_over=answer.passed_over,
                    hours=hours,
                    why_not=why_not,
                )
            )
        costs = pricing.costs
        weighed = list(weighed_again(beside, policy.slowness, job=job, since=since))
    unread = sum(not one.would for one in weighed)
    return PolicyReplay(
        policy=name,
        incidents=len(incidents),
        decisions=decisions,
        same=same,
        follow=follow,
        unreadable={**unreadable, **({NO_CASE: unread} if unread else {})},
        differences=differences,
        costs=costs,
        straggler_decisions=len(weighed),
        slow=[one for one in weighed if one.differs],
    )


def _said(act: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an act does; by which policy, and what that noted, is said elsewhere."""
    return {name: value for name, value in act.items() if value and name not in {"policy", "noted"}}


def _asked(session: Session, job: Job | None, since: float | None) -> Iterator[Any]:
    """Yield the decisions with their cases, in the order in which they were made."""
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
    """What recoveries took, by action: read when the first difference asks."""

    session: Session
    _costs: dict[str, ActionCost] | None = None

    @property
    def costs(self) -> dict[str, ActionCost]:
        """Return the median of each action, over all recoveries of the history that needed one decision."""
        if self._costs is None:
            took = defaultdict[str, list[float]](list)
            for action, seconds in self.session.connection().execute(_single_recoveries()):
                took[action].append(seconds)
            self._costs = {action: ActionCost(median(all_of), len(all_of)) for action, all_of in took.items()}
        return self._costs

    def difference(self, row: Any, action: RecoveryAction) -> tuple[float | None, str]:  # noqa: ANN401 (a row of several tables)
        """Return the compute-hours that *action* would have won in the incident of *row*, or none and why nobody can tell."""
        if RecoveryAction.GIVE_UP in {action, row.action}:
            return None, "the one ends the job, the other does not"
        if action == row.action:
            return None, "the same action, on other nodes"
        if row.outcome != "recovered":
            return None, f"the incident {'is open' if row.outcome is None else 'did not end in a recovery'}"
        if action not in self.costs:
            return None, f"no recovery by {action} is on record"
        took: Any = self.session.exec(sqlmodel.select(func.sum(Phase.seconds)).where(col(Phase.incident_id) == row.incident_id)).one()
        width = self.session.exec(
            sqlmodel.select(Generation.world_size).where(
                col(Generation.job_id) == row.job_id, col(Generation.number) == row.generation_before
            )
        ).first()
        if took is None or not width:
            return None, "what the incident took is not on record"
        return (took - self.costs[action].seconds) * width / 3600, ""


def _single_recoveries() -> Any:  # noqa: ANN401 (SQLAlchemy's own type)
    """Return the query for what each recovery took, by action: those that needed one decision, as others went through several actions."""
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
