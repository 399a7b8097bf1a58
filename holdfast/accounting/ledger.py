"""Amounts of time, exact: whole microseconds, so that the parts of a job's time add up to the whole without a remainder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

SECOND: Final = 1_000_000
"""Microseconds."""
HOUR: Final = 3600 * SECOND


class Use(StrEnum):
    """What became of a piece of time."""

    PRODUCTIVE = "productive"
    SNAPSHOTS = "snapshots"
    CHECKPOINTS = "checkpoints"
    LAUNCH = "launch"
    MOVES = "planned moves"
    BESIDE = "beside steps"
    UNSEEN = "steps unknown"
    ENDING = "ending"
    LOST = "lost to faults"
    SPARE = "idle spares"


MEANING: Final[dict[Use, str]] = {
    Use.PRODUCTIVE: "steps that were kept",
    Use.SNAPSHOTS: "of kept steps, what snapshots in memory took",
    Use.CHECKPOINTS: "training stood for a save",
    Use.LAUNCH: "from the submission to the first step",
    Use.MOVES: "changes of place that nobody's fault asked for",
    Use.BESIDE: "between steps, and the one that is under way",
    Use.UNSEEN: "ran, and told of no steps: what of it was kept is not known",
    Use.ENDING: "after the last step: last save, shutdown",
    Use.LOST: "downtime of incidents, and steps thrown away",
    Use.SPARE: "places on nodes of the job that held no rank",
}
UNFINISHED: Final = "unfinished step"
"""Phase of a loss: what the step had taken that a fault cut short."""
ROLLBACK: Final = "rollback"
NOT_TOLD: Final = "other"
"""Phase of downtime that no recorded phase accounts for."""


class LedgerAccount(NamedTuple):
    """Where an amount is booked; *phase* and *incident* belong to losses alone."""

    use: Use
    phase: str = ""
    incident: str = ""


@dataclass(slots=True)
class Amount:
    """Time, in microseconds."""

    wall: int = 0
    """Of the job, however many devices it had: idle spares have none, as they idle beside it."""
    devices: int = 0
    """Of every single device."""

    def add(self, wall: int, devices: int) -> None:
        """Add so much."""
        self.wall += wall
        self.devices += devices

    @property
    def hours(self) -> float:
        """Return the hours of all devices."""
        return self.devices / HOUR


@dataclass(slots=True)
class Ledger:
    """Amounts by account."""

    booked: defaultdict[LedgerAccount, Amount] = field(default_factory=lambda: defaultdict(Amount))

    def book(self, account: LedgerAccount, wall: int, devices: int) -> None:
        """Book *wall* microseconds of a job that had so many *devices* then."""
        if wall:
            self.booked[account].add(wall, wall * devices)

    def idle(self, devices: int) -> None:
        """Book microseconds of devices that held no rank."""
        if devices:
            self.booked[LedgerAccount(Use.SPARE)].add(0, devices)

    def move(self, source: LedgerAccount, target: LedgerAccount, millionths: int = 1_000_000) -> None:
        """Book so many *millionths* (default: all) of what is in *source* to *target* instead."""
        held = self.booked.get(source)
        if held is None or millionths <= 0:
            return
        wall, devices = (amount * min(millionths, 1_000_000) // 1_000_000 for amount in (held.wall, held.devices))
        held.add(-wall, -devices)
        self.booked[target].add(wall, devices)

    def take_in(self, other: Ledger) -> None:
        """Add all of *other*."""
        for account, amount in other.booked.items():
            self.booked[account].add(amount.wall, amount.devices)

    def sum(self, use: Use | None = None) -> Amount:
        """Return all of *use*, or everything."""
        found = Amount()
        for account, amount in self.booked.items():
            if use is None or account.use is use:
                found.add(amount.wall, amount.devices)
        return found

    def losses(self) -> Iterator[tuple[LedgerAccount, Amount]]:
        """Yield what was lost, by phase and incident."""
        yield from ((account, amount) for account, amount in self.booked.items() if account.use is Use.LOST)
