"""The width that a job went without: ranks that were missing, for as long as they were, put down to the incident that took them.

Nobody held that compute, so it is no part of the accounts: it stands beside them.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from holdfast.accounting.timeline import JobTimeline


def gone_without(life: JobTimeline, *, since: int | None = None) -> Counter[str]:
    """Return the microseconds of devices that *life* went without (after *since*), by the id of the incident; empty: by none.

    Where a job grows again by a part, those are back that were lost last.
    """
    begin, found = life.begin if since is None else since, Counter[str]()
    answered = {one.generation_after: one.id for one in life.troubles}
    lost: list[str] = []
    """For each device that is missing the incident that took it."""
    for era, after in pairwise([*life.eras, None]):
        assert era is not None
        missing = max(0, life.full - era.devices)
        lost = lost[:missing] + [answered.get(era.number, "")] * (missing - len(lost))
        until = life.end if after is None else min(after.at, life.end)
        for incident, devices in Counter(lost).items():
            found[incident] += devices * max(0, until - max(era.at, begin))
    return +found
