"""A node that is to be left by a time: move its ranks while training goes on, go on as it is, or leave before it is too late."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

AGAIN: Final = 30.0
"""Seconds after which a planned move that came to nothing is tried again, while there is time."""
STOP: Final = 10.0
"""Seconds that it may take to stop all ranks, beside what is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A node that is to be left, and why."""

    node: str
    reason: str
    """Who takes it away, until when, and why: in words."""
    since: float
    """When this was known (seconds since 1970)."""
    by: float | None = None
    """When it has to be empty; empty: as soon as that interrupts nobody."""

    def latest(self, save: float) -> float:
        """Return when ranks that are still there have to stop, so that *save* seconds are left for what they hold.

        Of a notice that leaves hardly more than that, half goes to the attempt to move.
        """
        return float("inf") if self.by is None else self.by - min(save + STOP, (self.by - self.since) / 2)

    def is_urgent(self, now: float, save: float) -> bool:
        """Tell whether no more than the time of a last save is left: who has nowhere to go uses it for that."""
        return self.by is not None and now >= self.by - save - STOP


def ends_at(*, submitted: float, walltime: float, save: float) -> float:
    """Return when a job of so many seconds has to stop for its last save: a tenth of its time at most goes to that."""
    return submitted + walltime - min(save + STOP, walltime / 10)


class DrainAction(StrEnum):
    """What to do about a node that is to be left."""

    MOVE = "move"
    """Move its ranks while training goes on."""
    STAY = "stay"
    """Train on there meanwhile."""
    LEAVE = "leave"
    """Stop, save, and go on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainView:
    """How a job stands to a node that holds ranks of it."""

    now: float
    blocked_reason: str = ""
    """Why ranks of this job cannot move while training goes on; empty where they can."""
    room: bool = False
    """Another node can take them."""
    tried: float | None = None
    """When a planned move was last begun."""
    outcome: str = ""
    """Why it came to nothing."""
    save: float = 0.0
    """Seconds that a last save may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextDrainStep:
    """What to do, and why."""

    act: DrainAction
    reason: str


def next_action(departure: Drain, seen: DrainView) -> NextDrainStep:
    """Return what to do about a node that is to be left. A last save begins while there is time for it, whatever was hoped for."""
    if seen.now >= departure.latest(seen.save):
        return NextDrainStep(act=DrainAction.LEAVE, reason=f"{departure.reason}; {_why_there(seen)}")
    due = seen.tried is None or seen.now - seen.tried >= AGAIN
    if not seen.blocked_reason and seen.room and due:
        return NextDrainStep(act=DrainAction.MOVE, reason=departure.reason)
    if departure.by is None:
        rest = "training goes on there until they can, as no time is set"
    else:
        rest = "training goes on there; shortly before that time it is saved and goes on without the node, or ends"
    return NextDrainStep(
        act=DrainAction.STAY,
        reason=f"{departure.node} is to be left: {departure.reason}. Its ranks are there still: {_why_there(seen)}; {rest}",
    )


def _why_there(seen: DrainView) -> str:
    if seen.blocked_reason:
        return f"they cannot move while training goes on, as {seen.blocked_reason}"
    if seen.outcome:
        return f"a planned move came to nothing: {seen.outcome}"
    return "a planned move has not come to an end" if seen.room else "no other node is free"
