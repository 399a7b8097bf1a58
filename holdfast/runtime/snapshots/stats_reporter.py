"""What a rank tells its agent of its snapshots. It goes along with the beats of its steps: no message is sent for its sake."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.snapshots.stats import SnapshotCounts

PAUSE: Final = 1.0
"""Seconds between two words about what snapshots cost; which one is the newest is said at every step."""
SUMS: Final = ("taken", "given_up", "copied", "overlapped", "paused", "prepared", "slowed", "trained")
"""Counts that grow while a process lives; they are told from the begin of its generation on."""


class StatsReporter:
    """One rank's account of its snapshots, begun anew in each generation: accounts of generations can then be added up."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._opening = SnapshotCounts()
        self._next = 0.0
        self.why = ""
        """Why this rank takes none, where that is its own doing."""

    def said(self, snapshotter: Snapshotter | None, generation: int) -> dict[str, Any]:
        """Return what goes with the beat of a step: the newest whole snapshot, and now and then how often they are taken and their cost.

        ``at`` is wall clock; ``copied``, ``overlapped`` (of it, while training waited anyway), ``paused``, ``prepared``, ``slowed`` (by
        which snapshots made steps longer) and ``trained`` are seconds of this generation, ``size`` is in bytes.
        """
        if snapshotter is None:
            return {"why": self.why} if self.why and self._is_due() else {}
        counts = snapshotter.counts
        if generation != self._generation:
            self._generation, self._opening, self._next = generation, replace(counts), 0.0
        told: dict[str, Any] = {} if counts.newest is None else {"step": counts.newest, "at": counts.newest_at}
        if self._is_due():
            told |= {"every": snapshotter.every, "size": counts.size}
            told |= {name: max(0, getattr(counts, name) - getattr(self._opening, name)) for name in SUMS}
        return told

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + PAUSE
        return True
