"""What failures cost a job, as every view shows it: ETTR, downtime, steps lost. They are computed here and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from holdfast.accounting.attribution import attribute, total_downtime
from holdfast.accounting.ledger import ROLLBACK, SECOND, Ledger, TimeCategory
from holdfast.accounting.timeline import JobTimeline
from holdfast.accounting.timeline_reader import COMPUTE, TimelineReader, known_jobs
from holdfast.history.models import Job
from holdfast.history.store import History

UNTIL_STEP: Final = "first new step"
UNTIL_STARTED: Final = "start of the processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCosts:
    """What failures cost."""

    wall_s: float
    """Seconds from the submission to the end, or until now, without suspensions."""
    productive_s: float
    """Seconds of steps that were kept, without the part that snapshots took."""
    downtime_s: float
    """Seconds from each fault until training resumed, if that was reported; an open incident counts until now, and no second twice."""
    until: tuple[str, ...]
    """What the downtimes end with: `UNTIL_STEP`, `UNTIL_STARTED`, or both."""
    steps_lost: int | None
    """Steps whose results were thrown away; None if steps are not reported."""
    rollback_s: float
    """Seconds that the lost steps had taken."""

    @property
    def ettr(self) -> float | None:
        """Return the effective training time ratio, productive seconds over wall seconds; None if no step is known."""
        return self.productive_s / self.wall_s if self.productive_s and self.wall_s else None

    @property
    def steps_known(self) -> bool:
        """Return whether any of the jobs reported a step: without, nobody knows what was productive."""
        return self.steps_lost is not None

    @classmethod
    def of(cls, timeline: JobTimeline, ledger: Ledger, *, since: int | None = None) -> Self:
        """Return the costs of the job with *timeline* and *ledger*, from *since* on if given (microseconds since 1970)."""
        begin = timeline.begin if since is None else max(since, timeline.begin)
        over = [one for one in timeline.incidents if one.outcome == "recovered" and one.recovered_at > begin]
        return cls(
            wall_s=ledger.sum().wall / SECOND,
            productive_s=ledger.sum(TimeCategory.PRODUCTIVE).wall / SECOND,
            downtime_s=total_downtime(timeline, begin) / SECOND,
            until=tuple(sorted({UNTIL_STARTED if one.until_started else UNTIL_STEP for one in over})),
            steps_lost=sum(steps.lost_since(begin) for steps in timeline.steps.values()) if timeline.reports_steps else None,
            rollback_s=sum(amount.wall for account, amount in ledger.losses() if account.phase == ROLLBACK) / SECOND,
        )

    @classmethod
    def sum(cls, parts: Iterable[FailureCosts]) -> Self:
        """Return the costs of several jobs together; jobs that report no steps do not count as 0 steps."""
        found = list(parts)
        counted = [one.steps_lost for one in found if one.steps_lost is not None]
        return cls(
            wall_s=sum(one.wall_s for one in found),
            productive_s=sum(one.productive_s for one in found),
            downtime_s=sum(one.downtime_s for one in found),
            until=tuple(sorted({end for one in found for end in one.until})),
            steps_lost=sum(counted) if counted else None,
            rollback_s=sum(one.rollback_s for one in found),
        )

    def as_record(self) -> dict[str, object]:
        """Return the costs as JSON, under the names that they have everywhere."""
        return {
            "ettr": self.ettr,
            "downtime_s": self.downtime_s,
            "downtime_until": list(self.until),
            "steps_lost": self.steps_lost,
            "rollback_s": self.rollback_s,
            "productive_s": self.productive_s,
            "wall_s": self.wall_s,
        }


def downtimes(history: History, jobs: Sequence[Job]) -> dict[str, float]:
    """Return `FailureCosts.downtime_s` of each of *jobs*, by the job's id, without reading their steps."""
    known = known_jobs(history, only=jobs, since=None, now=time.time())
    with history.session() as session:
        reader = TimelineReader(session=session, unit=COMPUTE, since=None)
        timelines = {one.id: reader.read(one, with_steps=False) for one in known}
    return {job: total_downtime(timeline, timeline.begin) / SECOND for job, timeline in timelines.items()}


def losses(history: History, job: Job, *, now: float | None = None) -> FailureCosts:
    """Return what failures cost *job* until its end, or until *now*."""
    (one,) = known_jobs(history, only=[job], since=None, now=time.time() if now is None else now)
    with history.session() as session:
        timeline = TimelineReader(session=session, unit=COMPUTE, since=None).read(one, with_steps=True)
    return FailureCosts.of(timeline, attribute(timeline))
