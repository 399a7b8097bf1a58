"""Flows that stand by for a job: each says so now and then, that one can see whether any is there, and whether it could steer."""

from __future__ import annotations

import os
import platform
import time
from typing import Final

from sqlmodel import col, select

from holdfast.history.models import Job, StandbyHeartbeat
from holdfast.history.store import History

EVERY: Final = 5.0
"""Seconds between two words of a flow that stands by."""
FRESH: Final = 30.0
"""Seconds without one after which it is taken for gone."""


def record_heartbeat(history: History, job: str, problem: str = "") -> None:
    """Say that this process stands by for the job called *job*, and what keeps it from control_job now."""
    with history.session(immediate=True) as session:
        session.merge(StandbyHeartbeat(job=job, host=platform.node(), pid=os.getpid(), at=time.time(), problem=problem))


def leave(history: History, job: str) -> None:
    """Say that this process stands by no more."""
    with history.session(immediate=True) as session:
        row = session.get(StandbyHeartbeat, (job, platform.node()))
        if row is not None and row.pid == os.getpid():
            session.delete(row)


def standby_heartbeats(history: History, job: Job) -> list[StandbyHeartbeat]:
    """Return the flows that stand by for *job*, or did so last, by host."""
    mine = select(StandbyHeartbeat).where(col(StandbyHeartbeat.job) == job.name, col(StandbyHeartbeat.at) >= job.at)
    with history.session() as session:
        return list(session.exec(mine.order_by(col(StandbyHeartbeat.host))))
