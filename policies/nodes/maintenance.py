"""Maintenance windows: planned times without certain nodes, once or repeated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceWindow:
    """A maintenance window of the cluster."""

    nodes: frozenset[str]
    start: datetime
    """Start of the first one; without a time zone in local time, so that a nightly window stays at its hour when clocks change."""
    duration: timedelta
    interval: timedelta | None = None
    """Interval between two starts; None: once."""
    lead_time: timedelta = timedelta(minutes=30)
    """Lead time: from then on its nodes get no new job, and ranks on them migrate."""
    reason: str = "maintenance"

    def around(self, now: float) -> tuple[float, float] | None:
        """Return start and end (Unix time) of the window at *now*, else of the next one; None if all are over."""
        if self.interval is None:
            return self._number(0) if now < self._number(0)[1] else None
        passed = max(0.0, now - self.start.timestamp())
        number = max(0, int(passed / self.interval.total_seconds()) - 1)  # a clock change may shift it by one
        while now >= self._number(number)[1]:
            number += 1
        return self._number(number)

    def _number(self, number: int) -> tuple[float, float]:
        begins = self.start + number * (self.interval or timedelta(0))
        end = begins.timestamp() + self.duration.total_seconds()
        return begins.timestamp(), end


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOutage:
    """A maintenance window that affects a node now or soon."""

    start: float
    """Unix time."""
    ends: float
    reason: str


def window_before(windows: Iterable[MaintenanceWindow], node: str, now: float, until: float) -> PlannedOutage | None:
    """Return the window of *node* at *now*, or the first one that starts before *until*."""
    found = planned_outage(windows, node, now, ahead=until - now)
    return found if found is not None and found.start < until else None


def planned_outage(
    windows: Iterable[MaintenanceWindow], node: str, now: float, *, soon: bool = True, ahead: float = 0.0
) -> PlannedOutage | None:
    """Return the window of *node* at *now*, or (if *soon*) the first one within its lead time, which is at least *ahead* seconds."""
    found = []
    for window in windows:
        if node not in window.nodes or (time := window.around(now)) is None:
            continue
        begins, ends = time
        if not soon or now >= begins - max(ahead, window.lead_time.total_seconds()):
            found.append(PlannedOutage(start=begins, ends=ends, reason=window.reason))
    return min(found, key=lambda one: one.start, default=None)
