"""Ask another policy what was asked about slow ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy
from sqlmodel import Session, col

from detectors.codec import MalformedData, unpacked
from holdfast.history.models import Job, StragglerDecision
from policies.slowness import MigrateStraggler, StragglerCase

NO_CASE = "what a slow rank was weighed by cannot be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReweighedStraggler:
    """What was decided about a slow rank, and what another policy would have."""

    job: str
    at: float
    rank: int
    node: str
    decided: str
    decided_reason: str
    would: str
    """Empty where the record cannot be read."""
    reason: str

    @property
    def differs(self) -> bool:
        """Tell whether it would have been decided otherwise."""
        return bool(self.would) and self.would != self.decided


def weighed_again(session: Session, rule: MigrateStraggler, *, job: Job | None, since: float | None) -> Iterator[ReweighedStraggler]:
    """Yield what *rule* says of all slow ranks on record, of *job* or since *since* (seconds since 1970) where given."""
    columns = (
        Job.name,
        StragglerDecision.at,
        StragglerDecision.rank,
        StragglerDecision.node,
        StragglerDecision.act,
        StragglerDecision.reason,
        StragglerDecision.record,
    )
    wanted = (
        sqlalchemy.select(*map(col, columns)).join(Job, col(Job.id) == col(StragglerDecision.job_id)).order_by(col(StragglerDecision.at))
    )
    if job is not None:
        wanted = wanted.where(col(StragglerDecision.job_id) == job.id)
    if since is not None:
        wanted = wanted.where(col(StragglerDecision.at) >= since)
    for row in session.connection().execute(wanted):
        name, at, rank, node, act, reason, record = tuple(row)
        try:
            again = rule(unpacked(StragglerCase, record))
            would, why = str(again.act), again.reason
        except MalformedData:  # of a newer version, or damaged
            would, why = "", NO_CASE
        yield ReweighedStraggler(job=name, at=at, rank=rank, node=node, decided=act, decided_reason=reason, would=would, reason=why)
