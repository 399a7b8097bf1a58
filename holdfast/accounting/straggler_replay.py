"""Ask another policy what was asked about slow ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy
from sqlmodel import Session, col

from detectors.codec import Misshapen, unpacked
from holdfast.history.models import Job, Weighing
from policies.slowness import MoveWhenItPays, SlowRank

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


def weighed_again(session: Session, rule: MoveWhenItPays, *, job: Job | None, since: float | None) -> Iterator[ReweighedStraggler]:
    """Yield what *rule* says of all slow ranks on record, of *job* or since *since* (seconds since 1970) where given."""
    columns = (Job.name, Weighing.at, Weighing.rank, Weighing.node, Weighing.act, Weighing.reason, Weighing.record)
    wanted = sqlalchemy.select(*map(col, columns)).join(Job, col(Job.id) == col(Weighing.job_id)).order_by(col(Weighing.at))
    if job is not None:
        wanted = wanted.where(col(Weighing.job_id) == job.id)
    if since is not None:
        wanted = wanted.where(col(Weighing.at) >= since)
    for row in session.connection().execute(wanted):
        name, at, rank, node, act, reason, record = tuple(row)
        try:
            again = rule(unpacked(SlowRank, record))
            would, why = str(again.act), again.reason
        except Misshapen:  # of a newer version, or damaged
            would, why = "", NO_CASE
        yield ReweighedStraggler(job=name, at=at, rank=rank, node=node, decided=act, decided_reason=reason, would=would, reason=why)
