"""Maintenance windows: times at which nodes are taken away, known beforehand, perhaps again and again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceWindow:
    """One entry of the cluster's plan."""

    nodes: frozenset[str]
    begins: datetime
    """Of its first time; without a zone it is this machine's, so that a nightly one stays at its hour when the clocks change."""
    lasts: timedelta
    every: timedelta | None = None
    """From the begin of one to that of the next; empty: once."""
    ahead: timedelta = timedelta(minutes=30)
    """So long before it begins, no job is given its nodes any more, and those that are there move away."""
    reason: str = "maintenance"

    def around(self, now: float) -> tuple[float, float] | None:
        """Return begin and end (seconds since 1970) of the one that goes on at *now*, or else of the next; nothing when all are over."""
        if self.every is None:
            return self._number(0) if now < self._number(0)[1] else None
        passed = max(0.0, now - self.begins.timestamp())
        number = max(0, int(passed / self.every.total_seconds()) - 1)  # clocks that change may put it off by one
        while now >= self._number(number)[1]:
            number += 1
        return self._number(number)

    def _number(self, number: int) -> tuple[float, float]:
        begins = self.begins + number * (self.every or timedelta(0))
        end = begins.timestamp() + self.lasts.total_seconds()
        return begins.timestamp(), end


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOutage:
    """A node that a window takes away, or will soon."""

    begins: float
    """Seconds since 1970."""
    ends: float
    reason: str


def window_before(windows: Iterable[MaintenanceWindow], node: str, now: float, until: float) -> PlannedOutage | None:
    """Return the window that takes *node* away at *now* or begins before *until*: of several the one that begins first."""
    found = planned_outage(windows, node, now, ahead=until - now)
    return found if found is not None and found.begins < until else None


def planned_outage(
    windows: Iterable[MaintenanceWindow], node: str, now: float, *, soon: bool = True, ahead: float = 0.0
) -> PlannedOutage | None:
    """Return the window that takes *node* away at *now*, or (if *soon*) before long: of several the one that begins first.

    *ahead*: what counts as long before, in seconds, where that is more than the window says itself.
    """
    found = []
    for window in windows:
        if node not in window.nodes or (time := window.around(now)) is None:
            continue
        begins, ends = time
        if not soon or now >= begins - max(ahead, window.ahead.total_seconds()):
            found.append(PlannedOutage(begins=begins, ends=ends, reason=window.reason))
    return min(found, key=lambda one: one.begins, default=None)
