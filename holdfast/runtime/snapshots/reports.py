"""What a rank reports of its snapshots: with the heartbeats of its steps, and in a file for `holdfast report --profile`."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from holdfast.runtime.snapshots.config import SnapshotCounts
from holdfast.runtime.snapshots.snapshotter import Snapshotter

REPORT_SECONDS: Final = 1.0
"""Seconds between two reports of the cost; the newest snapshot is reported at every step."""
SUMS: Final = ("taken", "given_up", "copied", "overlapped", "paused", "prepared", "slowed", "trained")
"""Counters that grow while a process lives; they are reported from the start of its generation on."""
PROFILE_FORMAT: Final = 1
PROFILE_SECONDS: Final = 5.0
"""Seconds between two profile files of a rank."""


class StatsReporter:
    """One rank's statistics, restarted in each generation so that those of generations can be added up."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._opening = SnapshotCounts()
        self._next = 0.0
        self.why = ""
        """Why this rank takes no snapshots, if it decided so itself."""

    def stats(self, snapshotter: Snapshotter | None, generation: int) -> dict[str, Any]:
        """Return what is sent with a step: the newest complete snapshot, and once in `REPORT_SECONDS` the interval and the cost.

        ``at`` is wall clock; ``copied``, ``overlapped`` (of it, while training waited), ``paused``, ``prepared``, ``slowed`` (by
        which snapshots made steps longer) and ``trained`` are seconds of this generation, ``size`` is in bytes.
        """
        if snapshotter is None:
            return {"why": self.why} if self.why and self._is_due() else {}
        counts = snapshotter.counts
        if generation != self._generation:
            self._generation, self._opening, self._next = generation, replace(counts), 0.0
        found: dict[str, Any] = {} if counts.newest is None else {"step": counts.newest, "at": counts.newest_at}
        if self._is_due():
            found |= {"every": snapshotter.every, "size": counts.size}
            found |= {name: max(0, getattr(counts, name) - getattr(self._opening, name)) for name in SUMS}
            found |= {"why": snapshotter.why} if snapshotter.why else {}
        return found

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + REPORT_SECONDS
        return True


class ProfileFile:
    """Writes one rank's profile into the checkpoint directory: what its steps look like and what its snapshots cost."""

    def __init__(self, checkpoints: Path | None) -> None:
        self._folder = None if checkpoints is None else checkpoints / "profile"
        self._next = 0.0

    def due(self) -> bool:
        """Return whether it is time for another file."""
        return self._folder is not None and time.monotonic() >= self._next

    def write(self, snapshotter: Snapshotter, facts: dict[str, Any]) -> None:
        """Write the file; *facts*: rank, world, generation, and the layout. Errors are ignored."""
        trace, profile, plan = snapshotter.newest, snapshotter.planning.profile, snapshotter.planning.plan
        if self._folder is None or trace is None or not len(profile):
            return
        self._next = time.monotonic() + PROFILE_SECONDS
        content = {
            "format": PROFILE_FORMAT,
            **facts,
            "node": os.environ.get("HOLDFAST_NODE", ""),
            "time": time.time(),
            "seconds": profile.step,
            "idle": profile.idle,
            "windows": [asdict(one) for one in profile.predicted()],
            "timeline": trace.windows,
            "took": trace.took,
            "began": trace.began,
            "copies": trace.copies,
            "operations": trace.operations,
            "plan": None if plan is None else {**asdict(plan), "pause": plan.pause, "overhead": plan.overhead},
            "counts": asdict(snapshotter.counts),
            "every": snapshotter.every,
        }
        path = self._folder / f"rank-{facts['rank']:05d}.json"
        temporary = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # checkpoints report errors of this directory already
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content))
            temporary.replace(path)
