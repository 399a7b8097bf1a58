"""What faults cost one job, in the figures that every view shows: ETTR, downtime, steps lost. Computed here and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from holdfast.accounting.attribution import settle, time_down
from holdfast.accounting.ledger import ROLLBACK, SECOND, Ledger, Use
from holdfast.accounting.timeline import JobTimeline
from holdfast.accounting.timeline_reader import COMPUTE, TimelineReader, known
from holdfast.history.models import Job
from holdfast.history.store import History

UNTIL_STEP: Final = "first new step"
UNTIL_STARTED: Final = "start of the processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCosts:
    """What faults cost."""

    wall_s: float
    """Seconds from the submission to the end, or until now; what a job was suspended for is not counted."""
    productive_s: float
    """Seconds of steps that were kept, without what snapshots took of them."""
    downtime_s: float
    """Seconds from each fault until training went on, as far as that was seen; an open incident counts until now, and no second twice."""
    until: tuple[str, ...]
    """What the downtimes end with: `UNTIL_STEP`, `UNTIL_STARTED`, or both."""
    steps_lost: int | None
    """Steps whose results were thrown away; None where steps are not reported."""
    rollback_s: float
    """Seconds that they had taken."""

    @property
    def ettr(self) -> float | None:
        """Return the effective training time ratio, productive seconds over wall seconds; None where no step is known."""
        return self.productive_s / self.wall_s if self.productive_s and self.wall_s else None

    @classmethod
    def of(cls, life: JobTimeline, ledger: Ledger, *, since: int | None = None) -> Self:
        """Return the losses of *life*, whose accounts are in *ledger*; both of what came after *since* where that is given."""
        begin = life.begin if since is None else max(since, life.begin)
        over = [one for one in life.troubles if one.outcome == "recovered" and one.back_at > begin]
        return cls(
            wall_s=ledger.sum().wall / SECOND,
            productive_s=ledger.sum(Use.PRODUCTIVE).wall / SECOND,
            downtime_s=time_down(life, begin) / SECOND,
            until=tuple(sorted({UNTIL_STARTED if one.until_started else UNTIL_STEP for one in over})),
            steps_lost=sum(steps.lost_since(begin) for steps in life.steps.values()) if life.tells_steps else None,
            rollback_s=sum(amount.wall for account, amount in ledger.losses() if account.phase == ROLLBACK) / SECOND,
        )

    @classmethod
    def sum(cls, parts: Iterable[FailureCosts]) -> Self:
        """Return the losses of several jobs together; steps of jobs that report none are in no sum."""
        found = list(parts)
        counted = [one.steps_lost for one in found if one.steps_lost is not None]
        return cls(
            wall_s=sum(one.wall_s for one in found),
            productive_s=sum(one.productive_s for one in found),
            downtime_s=sum(one.downtime_s for one in found),
            until=tuple(sorted({words for one in found for words in one.until})),
            steps_lost=sum(counted) if counted else None,
            rollback_s=sum(one.rollback_s for one in found),
        )

    def as_record(self) -> dict[str, object]:
        """Return the figures as a program reads them, by the names that they have everywhere."""
        return {
            "ettr": self.ettr,
            "downtime_s": self.downtime_s,
            "downtime_until": list(self.until),
            "steps_lost": self.steps_lost,
            "rollback_s": self.rollback_s,
            "productive_s": self.productive_s,
            "wall_s": self.wall_s,
        }


def downtime(history: History, job: Job) -> float:
    """Return the `FailureCosts.downtime_s` of *job* alone, for which no step need be read."""
    (one,) = known(history, only=[job], since=None, now=time.time())
    with history.session() as session:
        life = TimelineReader(session=session, unit=COMPUTE, since=None).life(one, with_steps=False)
    return time_down(life, life.begin) / SECOND


def losses(history: History, job: Job, *, now: float | None = None) -> FailureCosts:
    """Return what faults cost *job* until its end, or until *now*."""
    at = time.time() if now is None else now
    (one,) = known(history, only=[job], since=None, now=at)
    with history.session() as session:
        life = TimelineReader(session=session, unit=COMPUTE, since=None).life(one)
    return FailureCosts.of(life, settle(life))
