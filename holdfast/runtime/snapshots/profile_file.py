"""Leave beside the checkpoints what a rank's steps look like and what its snapshots cost, for `holdfast profile`."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from holdfast.runtime.snapshots.snapshotter import Snapshotter

FORMAT: Final = 1
PAUSE: Final = 5.0
"""Seconds between two files of a rank."""


class ProfileFile:
    """Writes one rank's file."""

    def __init__(self, checkpoints: Path | None) -> None:
        self._folder = None if checkpoints is None else checkpoints / "profile"
        self._next = 0.0

    def due(self) -> bool:
        """Tell whether it is time for another file."""
        return self._folder is not None and time.monotonic() >= self._next

    def tell(self, snapshotter: Snapshotter, facts: dict[str, Any]) -> None:
        """Write the file; *facts*: rank, world, generation, and the layout."""
        if self._folder is None or snapshotter.newest is None or not len(snapshotter.planning.profile):
            return
        self._next = time.monotonic() + PAUSE
        path = self._folder / f"rank-{facts['rank']:05d}.json"
        beside = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a checkpoint that cannot be written is told of; this is not worth a second word
            self._folder.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(_told(snapshotter, facts)))
            beside.replace(path)


def _told(snapshotter: Snapshotter, facts: dict[str, Any]) -> dict[str, Any]:
    lived, plan = snapshotter.newest, snapshotter.planning.plan
    assert lived is not None
    return {
        "format": FORMAT,
        **facts,
        "node": os.environ.get("HOLDFAST_NODE", ""),
        "time": time.time(),
        "seconds": snapshotter.planning.profile.step,
        "idle": snapshotter.planning.profile.idle,
        "windows": [asdict(one) for one in snapshotter.planning.profile.predicted()],
        "timeline": lived.windows,
        "took": lived.took,
        "began": lived.began,
        "copies": lived.copies,
        "operations": lived.operations,
        "plan": None if plan is None else {**asdict(plan), "pause": plan.pause, "overhead": plan.overhead},
        "counts": asdict(snapshotter.counts),
        "every": snapshotter.every,
    }
