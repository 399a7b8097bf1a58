"""Choose which checkpoints of a folder may be deleted, and delete them. The newest one that training can resume from is always kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoints.inventory import stored_checkpoints
from holdfast.errors import OperatorError
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import InvalidatedSteps
from holdfast.runtime.checkpoint_verifier.findings import StoredCheckpoint, inspect_checkpoint


class CheckpointNotDeleted(OperatorError):
    """A checkpoint cannot be deleted."""

    step: int
    reason: str
    deleted: int
    """How many were deleted before it."""

    def __str__(self) -> str:
        before = f"{self.deleted} {'was' if self.deleted == 1 else 'were'} deleted before it"
        return f"the checkpoint of step {self.step} cannot be deleted: {self.reason}; {before}."


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What is kept, what may be deleted, and what is left as it is, each newest first."""

    keep: tuple[StoredCheckpoint, ...]
    """Complete ones that training can resume from. Where any is to be deleted, every byte of the newest was read."""
    delete: tuple[StoredCheckpoint, ...]
    """Complete ones that are older than all that are kept."""
    left: tuple[tuple[StoredCheckpoint, str], ...]
    """Others, and why they neither count nor are deleted."""

    @property
    def freed(self) -> int:
        """Return the bytes that the deletion frees."""
        return sum(one.manifest.size for one in self.delete if one.manifest is not None)


def plan_prune(
    directory: Path, keep: int, invalidated: InvalidatedSteps, recall: Callable[[Sequence[StoredCheckpoint]], None]
) -> PrunePlan:
    """Return which checkpoints in *directory* may be deleted so that the newest *keep* remain.

    *recall* adds the damage that was found earlier to those in the folder. Damaged ones do not count, nor those from which training must
    not resume (*invalidated*). Nothing is deleted unless a newer one was read in full and is intact, and nothing is read in full where
    nothing can be deleted. Raise `NotReadable` when the folder cannot be listed.
    """
    found = list[StoredCheckpoint]()
    left = list[tuple[StoredCheckpoint, str]]()
    stored = stored_checkpoints(directory)
    recall(stored)
    for one in stored:
        if not one.complete or one.manifest is None:
            left.append((one, _damage(one)))
        elif invalidated.covers(one.step, one.manifest.generation):
            left.append((one, "invalidated: training must not resume from it"))
        else:
            found.append(one)
    while len(found) > keep:
        newest = inspect_checkpoint(found[0].path, verify=True)
        if newest.complete:
            break
        left.append((newest, _damage(newest)))
        del found[0]
    left.sort(key=lambda item: -item[0].step)
    return PrunePlan(keep=tuple(found[:keep]), delete=tuple(found[keep:]), left=tuple(left))


def _damage(one: StoredCheckpoint) -> str:
    return f"{one.status}: {one.findings.broken[0]}"


def remove_remains(directory: Path) -> list[Path]:
    """Remove what interrupted deletions have left in *directory*; return it. Raise `CheckpointNotDeleted` when that is impossible."""
    remains = manifest.removed_in_part(directory)
    for path in remains:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:  # the job removes it, too
            continue
        except OSError as error:
            raise CheckpointNotDeleted(manifest.step_of(path), _why(error), 0) from error
    return remains


def delete_checkpoints(checkpoints: Sequence[StoredCheckpoint], recheck: Callable[[int], None]) -> list[StoredCheckpoint]:
    """Delete *checkpoints*, oldest first; return those that are gone. Raise `CheckpointNotDeleted` for the first that cannot be.

    Right before each deletion *recheck* gets the number of those that are gone, and raises where no further one may be deleted.
    An interruption leaves no torn checkpoint: `remove_remains` removes what remains of one, as does the job when it starts a generation.
    """
    gone = list[StoredCheckpoint]()
    for one in reversed(checkpoints):
        assert one.manifest is not None, "a complete checkpoint has a manifest"
        recheck(len(gone))
        try:
            manifest.remove(one.path, one.manifest.generation)
        except FileNotFoundError:  # the job has deleted it meanwhile
            continue
        except OSError as error:
            raise CheckpointNotDeleted(one.step, _why(error), len(gone)) from error
        gone.append(one)
    return gone


def _why(error: OSError) -> str:
    return error.strerror or str(error)
