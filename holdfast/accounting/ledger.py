"""Exact amounts of time: whole microseconds, so that the parts of a job's time add up to the total without a remainder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

SECOND: Final = 1_000_000
"""Microseconds."""
HOUR: Final = 3600 * SECOND


class TimeCategory(StrEnum):
    """What time was used for."""

    PRODUCTIVE = "productive"
    SNAPSHOTS = "snapshots"
    CHECKPOINTS = "checkpoints"
    STARTUP = "startup"
    MIGRATIONS = "planned migrations"
    BETWEEN_STEPS = "between steps"
    STEPS_UNKNOWN = "steps unknown"
    SHUTDOWN = "shutdown"
    LOST = "lost to failures"
    SPARE = "idle spares"


MEANING: Final[dict[TimeCategory, str]] = {
    TimeCategory.PRODUCTIVE: "steps that were kept",
    TimeCategory.SNAPSHOTS: "the part of kept steps that in-memory snapshots took",
    TimeCategory.CHECKPOINTS: "training stopped for a save",
    TimeCategory.STARTUP: "up to the first step; where none is reported, up to the launch",
    TimeCategory.MIGRATIONS: "placement changes that no fault caused",
    TimeCategory.BETWEEN_STEPS: "between steps, and the step under way",
    TimeCategory.STEPS_UNKNOWN: "ranks ran without reporting steps: what was kept is not known",
    TimeCategory.SHUTDOWN: "after the last step: last save, shutdown",
    TimeCategory.LOST: "downtime of incidents, and steps thrown away",
    TimeCategory.SPARE: "places on nodes of the job that held no rank",
}
UNFINISHED: Final = "unfinished step"
"""Phase of a loss: time spent on the step that a fault interrupted."""
ROLLBACK: Final = "rollback"
UNRECORDED: Final = "other"
"""Phase of downtime that no recorded phase covers."""


class LedgerAccount(NamedTuple):
    """Where an amount is booked; only losses have a *phase* and an *incident*."""

    category: TimeCategory
    phase: str = ""
    incident: str = ""


@dataclass(slots=True)
class Amount:
    """Time in microseconds."""

    wall: int = 0
    """Of the job, however many devices it had; idle spares have none."""
    devices: int = 0
    """Summed over devices."""

    @property
    def hours(self) -> float:
        """Return the device-hours."""
        return self.devices / HOUR


@dataclass(slots=True)
class Ledger:
    """Amounts by account."""

    booked: defaultdict[LedgerAccount, Amount] = field(default_factory=lambda: defaultdict(Amount))

    def book(self, account: LedgerAccount, wall: int, devices: int) -> None:
        """Book *wall* and *devices* microseconds."""
        if wall or devices:
            amount = self.booked[account]
            amount.wall += wall
            amount.devices += devices

    def move(self, source: LedgerAccount, target: LedgerAccount, millionths: int = 1_000_000) -> None:
        """Move *millionths* (default: all) of *source* to *target*."""
        amount = self.booked.get(source)
        if amount is None or millionths <= 0:
            return
        wall, devices = (part * min(millionths, 1_000_000) // 1_000_000 for part in (amount.wall, amount.devices))
        self.book(source, -wall, -devices)
        self.book(target, wall, devices)

    def add(self, other: Ledger) -> None:
        """Add all amounts of *other*."""
        for account, amount in other.booked.items():
            self.book(account, amount.wall, amount.devices)

    def sum(self, category: TimeCategory | None = None) -> Amount:
        """Return the sum of *category*, or of everything."""
        found = Amount()
        for account, amount in self.booked.items():
            if category is None or account.category is category:
                found.wall += amount.wall
                found.devices += amount.devices
        return found

    def losses(self) -> Iterator[tuple[LedgerAccount, Amount]]:
        """Yield what was lost, by phase and incident."""
        yield from ((account, amount) for account, amount in self.booked.items() if account.category is TimeCategory.LOST)
