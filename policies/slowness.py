"""A rank that holds the others up: move it to another node, or leave it where it is, by what either costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final

PAUSE: Final = 1.0
"""Seconds that a planned move is taken to hold training up before one was measured: ours take 0.1 to 0.4 s (docs/measured.md), on a machine
where hardly any state has to travel."""
RECOVERY: Final = 60.0
"""Seconds that a recovery is taken to cost which a move that stops halfway brings about (ours: a restart of all ranks, generously)."""
TRUST: Final = 50
"""Moves that are taken to have gone well before any was counted: so that one in 51 is expected to stop halfway at first (ours)."""


class StragglerAction(StrEnum):
    """What a job's file says is to follow."""

    TELL = "tell"
    AUTO = "auto"
    MIGRATE = "migrate"


class StragglerOutcome(StrEnum):
    """What is done about a slow rank."""

    WATCH = "watch"
    """Nothing: it may be cured by nobody, or nobody may."""
    STAY = "stay"
    """Nothing: moving would cost more than it brings."""
    MOVE = "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastMigration:
    """A rank that was moved for its slowness."""

    at: float
    rank: int
    node: str
    """The one that it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerCase:
    """All that the rule may know."""

    now: float
    kind: str
    rank: int
    node: str
    step: float
    """Seconds of a step now, a median."""
    lost: float
    """Seconds of it that the others wait for this rank, a median."""
    degraded: str = ""
    """What is known against its node, where that is why it is weighed."""
    remaining: int | None = None
    """Steps that are still to be done; empty where nobody knows."""
    wanted: StragglerAction = StragglerAction.AUTO
    blocked_reason: str = ""
    """Why ranks of this job cannot move while training goes on; empty where they can."""
    spares: tuple[str, ...] = ()
    """Nodes that it could move to."""
    pauses: tuple[float, ...] = ()
    """Seconds for which this job's planned moves held training up, each as the ranks measured it."""
    failed: int = 0
    """Planned moves of this job that came to nothing."""
    moved: tuple[PastMigration, ...] = ()
    """Ranks that were moved for their slowness before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """What to do, and the sum that says so."""

    act: StragglerOutcome
    reason: str
    staying: float | None = None
    """Seconds that slowness costs over the remaining time."""
    moving: float | None = None
    """Seconds that moving costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateStraggler:
    """Move a slow rank when that is cheaper by far than to go on with it where it is; and not again and again."""

    factor: float = 3.0
    """So many times what moving costs staying has to cost at least."""
    least: float = 60.0
    """Seconds that it has to bring at least."""
    horizon: float = 3_600.0
    """Seconds of training that are looked ahead where nobody knows how many steps are left."""
    each: int = 1
    """Moves of one rank within the window, or away from one node: after these its slowness has come along, or come back."""
    most: int = 4
    """Moves of slow ranks of the job within the window."""
    window: float = 86_400.0
    """Seconds."""

    def __call__(self, slow: StragglerCase) -> Weighed:
        """Return what to do about a slow rank, with the sum."""
        staying, over = self._staying(slow)
        moving, words = self._moving(slow)
        cost = f"staying costs {_said(slow.lost)} a step x {over} = {_said(staying)}; moving costs {words}"

        def answer(act: StragglerOutcome, why: str) -> Weighed:
            where = f"{slow.node} ({slow.degraded})" if slow.degraded else slow.node
            return Weighed(act=act, reason=f"rank {slow.rank} on {where}: {why}", staying=staying, moving=moving)

        if slow.wanted is StragglerAction.TELL:
            return answer(StragglerOutcome.WATCH, f"watched, as the job says (`checks.straggler: tell`); {cost}")
        if why := self._hopeless(slow):
            return answer(StragglerOutcome.WATCH, f"watched, as {why}; {cost}")
        if slow.wanted is StragglerAction.MIGRATE:
            return answer(StragglerOutcome.MOVE, f"moved, as the job says (`checks.straggler: migrate`); {cost}")
        needed = max(self.factor * moving, self.least)
        if staying < needed:
            return answer(StragglerOutcome.STAY, f"{cost}: left there, as a move has to bring {_said(needed)} at least")
        return answer(StragglerOutcome.MOVE, f"{cost}: moved")

    def _hopeless(self, slow: StragglerCase) -> str:
        """Return why no move can cure it, or none may be made."""
        if slow.blocked_reason:
            return f"it cannot move while training goes on: {slow.blocked_reason}"
        if not slow.spares:
            return "there is no other node to move it to"
        recent = [one for one in slow.moved if slow.now - one.at < self.window]
        if sum(one.rank == slow.rank for one in recent) >= self.each:
            return f"it was moved for it within {_said(self.window)}, and is slow again: that is its work, not its node"
        if sum(one.node == slow.node for one in recent) >= self.each:
            return f"a rank was moved away from {slow.node} for it within {_said(self.window)}, and this one is not to follow each time"
        if len(recent) >= self.most:
            return f"{len(recent)} slow ranks were moved within {_said(self.window)}, as many as may be"
        return ""

    def _staying(self, slow: StragglerCase) -> tuple[float, str]:
        if slow.remaining is not None:
            return slow.lost * slow.remaining, f"{slow.remaining:,} steps that are left"
        steps = self.horizon / max(slow.step, 1e-9)
        return slow.lost * steps, f"{steps:,.0f} steps ({_said(self.horizon)}, as nobody knows how many are left)"

    @staticmethod
    def _moving(slow: StragglerCase) -> tuple[float, str]:
        pause = median(slow.pauses) if slow.pauses else PAUSE
        whence = f"median of {len(slow.pauses)} moves" if slow.pauses else "an estimate, as none was measured"
        chance = (slow.failed + 1) / (slow.failed + len(slow.pauses) + TRUST + 1)
        risk = chance * RECOVERY
        return pause + risk, f"{_said(pause)} ({whence}) and {chance:.0%} of a recovery of {_said(RECOVERY)} = {_said(pause + risk)} once"


def _said(seconds: float) -> str:
    """Return *seconds* as people read them."""
    for limit, size, unit in ((1.0, 0.001, "ms"), (120.0, 1.0, "s"), (7_200.0, 60.0, "min"), (172_800.0, 3_600.0, "h")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400.0:.3g} d"
