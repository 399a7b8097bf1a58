"""Stragglers: migrate a slow rank to another node, or leave it where it is, whichever costs less."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final

PAUSE: Final = 1.0
"""Assumed pause of training for a migration before one was measured, in seconds: ours take 0.1 to 0.4 s (see the benchmarks) on one machine
with little state."""
RECOVERY: Final = 60.0
"""Assumed cost of a recovery after a migration that fails halfway, in seconds (ours: a restart of all ranks, generously)."""
TRUST: Final = 50
"""Successful migrations assumed before the first one: one in 51 is expected to fail halfway (ours)."""


class StragglerAction(StrEnum):
    """What the job file requests for stragglers."""

    REPORT = "report"
    AUTO = "auto"
    MIGRATE = "migrate"


class StragglerOutcome(StrEnum):
    """What to do about a slow rank."""

    WATCH = "watch"
    """Nothing: a migration does not help, or is not possible or allowed."""
    STAY = "stay"
    """Nothing: a migration would cost more than it saves."""
    MOVE = "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastMigration:
    """A past migration of a slow rank."""

    at: float
    rank: int
    node: str
    """Its node before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerCase:
    """Everything that the rule may read about a slow rank."""

    now: float
    kind: str
    rank: int
    node: str
    step: float
    """Step time in seconds now (median)."""
    lost: float
    """Seconds of a step that the others wait for this rank (median)."""
    degraded: str = ""
    """The fault of its node, if that is why it is assessed."""
    remaining: int | None = None
    """Remaining steps; None if unknown."""
    wanted: StragglerAction = StragglerAction.AUTO
    blocked_reason: str = ""
    """Why ranks of this job cannot migrate while training runs; empty if they can."""
    spares: tuple[str, ...] = ()
    """Nodes that it could migrate to."""
    pauses: tuple[float, ...] = ()
    """Pauses of this job's migrations in seconds, as the ranks measured them."""
    failed: int = 0
    """Failed migrations of this job."""
    moved: tuple[PastMigration, ...] = ()
    """Past migrations of slow ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerResult:
    """What to do, and the costs behind it."""

    act: StragglerOutcome
    reason: str
    staying: float | None = None
    """Cost of staying over the remaining time, in seconds."""
    moving: float | None = None
    """Cost of a migration, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateStraggler:
    """Migrate a slow rank if that is much cheaper than to leave it, and not repeatedly."""

    min_cost_ratio: float = 3.0
    """Minimum ratio of the cost of staying to the cost of a migration."""
    min_saving: float = 60.0
    """Minimum saving in seconds."""
    horizon: float = 3_600.0
    """Seconds of training to consider if the number of remaining steps is unknown."""
    max_migrations_per_rank: int = 1
    """Maximum migrations of one rank, or away from one node, within the window: after these the cause is not the node."""
    max_migrations: int = 4
    """Maximum migrations of slow ranks of the job within the window."""
    window: float = 86_400.0
    """Seconds."""

    def __call__(self, slow: StragglerCase) -> StragglerResult:
        """Return what to do about a slow rank, with the costs."""
        staying, over = self._staying(slow)
        moving, moving_text = self._moving(slow)
        cost = f"staying costs {_format(slow.lost)} a step x {over} = {_format(staying)}; a migration costs {moving_text}"

        def answer(act: StragglerOutcome, why: str) -> StragglerResult:
            where = f"{slow.node} ({slow.degraded})" if slow.degraded else slow.node
            return StragglerResult(act=act, reason=f"rank {slow.rank} on {where}: {why}", staying=staying, moving=moving)

        if slow.wanted is StragglerAction.REPORT:
            return answer(StragglerOutcome.WATCH, f"monitored only, as the job requests (`checks.straggler: report`); {cost}")
        if why := self._obstacle(slow):
            return answer(StragglerOutcome.WATCH, f"monitored only: {why}; {cost}")
        if slow.wanted is StragglerAction.MIGRATE:
            return answer(StragglerOutcome.MOVE, f"migrated, as the job requests (`checks.straggler: migrate`); {cost}")
        needed = max(self.min_cost_ratio * moving, self.min_saving)
        if staying < needed:
            return answer(StragglerOutcome.STAY, f"{cost}: left there, as a migration must save {_format(needed)}")
        return answer(StragglerOutcome.MOVE, f"{cost}: migrated")

    def _obstacle(self, slow: StragglerCase) -> str:
        """Return why a migration does not help or is not possible; empty otherwise."""
        if slow.blocked_reason:
            return f"it cannot migrate while training runs: {slow.blocked_reason}"
        if not slow.spares:
            return "there is no other node for it"
        recent = [one for one in slow.moved if slow.now - one.at < self.window]
        if sum(one.rank == slow.rank for one in recent) >= self.max_migrations_per_rank:
            return f"it migrated within {_format(self.window)} and is slow again: the cause is its work, not its node"
        if sum(one.node == slow.node for one in recent) >= self.max_migrations_per_rank:
            return f"a slow rank migrated from {slow.node} within {_format(self.window)}, and the next one does not follow"
        if len(recent) >= self.max_migrations:
            return f"{len(recent)} slow ranks migrated within {_format(self.window)}, which is the maximum"
        return ""

    def _staying(self, slow: StragglerCase) -> tuple[float, str]:
        if slow.remaining is not None:
            return slow.lost * slow.remaining, f"{slow.remaining:,} remaining steps"
        steps = self.horizon / max(slow.step, 1e-9)
        return slow.lost * steps, f"{steps:,.0f} steps ({_format(self.horizon)}, as the number of remaining steps is unknown)"

    @staticmethod
    def _moving(slow: StragglerCase) -> tuple[float, str]:
        pause = median(slow.pauses) if slow.pauses else PAUSE
        source = f"median of {len(slow.pauses)} migrations" if slow.pauses else "an estimate, none was measured"
        chance = (slow.failed + 1) / (slow.failed + len(slow.pauses) + TRUST + 1)
        risk = chance * RECOVERY
        return (
            pause + risk,
            f"{_format(pause)} ({source}) and {chance:.0%} of a recovery of {_format(RECOVERY)} = {_format(pause + risk)} once",
        )


def _format(seconds: float) -> str:
    """Format *seconds* with three digits and a unit."""
    for limit, size, unit in ((1.0, 0.001, "ms"), (120.0, 1.0, "s"), (7_200.0, 60.0, "min"), (172_800.0, 3_600.0, "h")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400.0:.3g} d"
