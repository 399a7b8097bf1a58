"""Drain a node by a deadline: migrate its ranks while training runs, keep training on it, or restart without it in time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

AGAIN: Final = 30.0
"""Seconds after which a failed migration is tried again."""
STOP: Final = 10.0
"""Seconds that stopping all ranks may take, in addition to the final checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A node to drain, and why."""

    node: str
    reason: str
    """Who removes it, until when, and why."""
    since: float
    """When the drain was requested (Unix time)."""
    by: float | None = None
    """Deadline (Unix time); None: as soon as it does not interrupt training."""

    def latest(self, save: float) -> float:
        """Return when remaining ranks must stop so that *save* seconds are left for the final checkpoint.

        If the notice is hardly longer than that, half of it goes to the attempt to migrate.
        """
        return float("inf") if self.by is None else self.by - min(save + STOP, (self.by - self.since) / 2)

    def is_urgent(self, now: float, save: float) -> bool:
        """Return whether only the time for the final checkpoint is left."""
        return self.by is not None and now >= self.by - save - STOP


def ends_at(*, submitted: float, walltime: float, save: float) -> float:
    """Return when a job with a *walltime* must stop for its final checkpoint, which gets at most a tenth of that time."""
    return submitted + walltime - min(save + STOP, walltime / 10)


class DrainAction(StrEnum):
    """What to do about a node to drain."""

    MOVE = "move"
    """Migrate its ranks while training runs."""
    STAY = "stay"
    """Keep training on it for now."""
    LEAVE = "leave"
    """Stop, save, and restart without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainView:
    """What the rule reads about a job with ranks on the node."""

    now: float
    blocked_reason: str = ""
    """Why ranks of this job cannot migrate while training runs; empty if they can."""
    room: bool = False
    """Whether another node can take them."""
    tried: float | None = None
    """When a migration was last started."""
    outcome: str = ""
    """Why it failed."""
    save: float = 0.0
    """Seconds that the final checkpoint may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextDrainStep:
    """What to do, and why."""

    act: DrainAction
    reason: str


def next_action(drain: Drain, view: DrainView) -> NextDrainStep:
    """Return what to do about a node to drain; the final checkpoint always starts while there is time for it."""
    if view.now >= drain.latest(view.save):
        return NextDrainStep(act=DrainAction.LEAVE, reason=f"{drain.reason}; {_why_there(view)}")
    due = view.tried is None or view.now - view.tried >= AGAIN
    if not view.blocked_reason and view.room and due:
        return NextDrainStep(act=DrainAction.MOVE, reason=drain.reason)
    if drain.by is None:
        rest = "training continues there until they can, as there is no deadline"
    else:
        rest = "training continues there; shortly before the deadline it is saved and restarts without the node, or ends"
    return NextDrainStep(
        act=DrainAction.STAY,
        reason=f"{drain.node} is to be drained: {drain.reason}. Its ranks are still there: {_why_there(view)}; {rest}",
    )


def _why_there(view: DrainView) -> str:
    if view.blocked_reason:
        return f"they cannot migrate while training runs: {view.blocked_reason}"
    if view.outcome:
        return f"a migration failed: {view.outcome}"
    return "a migration is in progress" if view.room else "no other node is free"
