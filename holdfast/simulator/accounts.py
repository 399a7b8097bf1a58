"""What the time of a simulated job was used for: every second of every GPU of the whole job is in one category."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

PRODUCTIVE: Final = "productive"
LOST_CAPACITY: Final = "lost capacity"
SLOWDOWN: Final = "slow nodes"
CHECKPOINTS: Final = "checkpoints"
SNAPSHOTS: Final = "snapshots"
OVERHEAD: Final = "overhead of each step"
ROLLBACK: Final = "rollback"
STARTUP: Final = "startup"
FAILED: Final = "failed job"
MIGRATION: Final = "migrations"
CATEGORIES: Final = (
    PRODUCTIVE,
    CHECKPOINTS,
    SNAPSHOTS,
    OVERHEAD,
    SLOWDOWN,
    LOST_CAPACITY,
    MIGRATION,
    "detect",
    "diagnose",
    "isolate",
    "wait",
    "reschedule",
    "communication",
    "load",
    "warm-up",
    "resume",
    "failed attempt",
    ROLLBACK,
    FAILED,
    STARTUP,
)
"""All categories in order; the phases of recoveries have the names of the history."""


@dataclass(slots=True)
class JobAccount:
    """Seconds by category, and counts, of one job."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Wall seconds: a part of the job counts for its share."""
    incidents: int = 0
    faults: int = 0
    """Faults that hit the job."""
    actions: Counter[str] = field(default_factory=Counter)
    """Recovery actions that were decided, by name."""
    timed_out: Counter[str] = field(default_factory=Counter)
    """Attempts that took longer than the policy allows, by action."""
    failures: int = 0
    """Times that the job failed and a person had to start it again."""
    failed_reason: str = ""
    """Why it first failed."""
    steps_lost: int = 0
    downtime: list[float] = field(default_factory=list)
    """Seconds from each incident until training went on, without the rollback."""
    completed_at: float | None = None
    """When it had done its `work`; None: it had not, or has no end."""

    def spend(self, category: str, seconds: float) -> None:
        """Add *seconds* of the whole job to *category*."""
        self.seconds[category] += seconds
