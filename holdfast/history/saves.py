"""What a job's checkpoints on record amount to: the newest complete one, and a save that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.history.models import Checkpoint, StepRecord

NOT_WRITTEN: Final = frozenset({"checkpoint-disk-full", "checkpoint-read-only", "checkpoint-write-failed"})
"""Problems of a checkpoint that was not written."""


def newest_complete(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the newest complete checkpoint; one that was found corrupt later does not count."""
    in_order = sorted(checkpoints, key=lambda one: one.at)
    newest_of_path = {one.path: one for one in in_order}  # a step that is made again after a recovery is written again
    return next((one for one in reversed(in_order) if newest_of_path[one.path] is one and not one.problem), None)


def failed_save(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the newest checkpoint that could not be written, unless a step as new is saved: training may have continued without it."""
    saved = newest_complete(checkpoints)
    in_order = sorted(checkpoints, key=lambda one: one.at)
    failed = next((one for one in reversed(in_order) if one.problem in NOT_WRITTEN and one.step is not None), None)
    if failed is None or failed.step is None or (saved is not None and (saved.step or 0) >= failed.step):
        return None
    return failed


def lost_end(saved: Checkpoint | None, failed: Checkpoint | None, last: StepRecord | None) -> bool:
    """Return whether the state after a job's *last* step is lost: a save has *failed*, and the newest one *saved* is of an earlier step.

    A problem that stays is reported once, so the failed save on record may be of an earlier step too.
    """
    return failed is not None and last is not None and (saved is None or (saved.step or 0) < last.step)
