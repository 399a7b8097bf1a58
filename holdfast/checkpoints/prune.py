"""Choose which checkpoints of a folder may be deleted, and delete them. The newest one that training can resume from is always kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoints.inventory import stored_checkpoints
from holdfast.errors import NotWritable
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import InvalidatedSteps
from holdfast.runtime.checkpoint_verifier.findings import StoredCheckpoint, inspect_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What is kept, what may be deleted, and what is left as it is, each newest first."""

    keep: tuple[StoredCheckpoint, ...]
    """Complete ones that training can resume from; every byte of the newest was read."""
    delete: tuple[StoredCheckpoint, ...]
    """Complete ones that are older than all that are kept."""
    left: tuple[tuple[StoredCheckpoint, str], ...]
    """Others, and why they neither count nor are deleted."""

    @property
    def freed(self) -> int:
        """Return the bytes that the deletion frees."""
        return sum(one.manifest.size for one in self.delete if one.manifest is not None)


def plan_prune(directory: Path, keep: int, invalidated: InvalidatedSteps) -> PrunePlan:
    """Return which checkpoints in *directory* may be deleted so that the newest *keep* remain.

    Damaged ones do not count, nor those from which training must not resume (*invalidated*). Nothing is deleted unless a newer one was
    read in full and is intact. Raise `NotReadable` when the folder cannot be listed.
    """
    kept, delete = list[StoredCheckpoint](), list[StoredCheckpoint]()
    left = list[tuple[StoredCheckpoint, str]]()
    for listed in stored_checkpoints(directory):
        one = inspect_checkpoint(listed.path, verify=True) if listed.complete and not kept else listed
        if not one.complete or one.manifest is None:
            left.append((one, f"{one.status}: {one.findings.broken[0]}"))
        elif invalidated.covers(one.step, one.manifest.generation):
            left.append((one, "invalidated: training must not resume from it"))
        elif len(kept) < keep:
            kept.append(one)
        else:
            delete.append(one)
    return PrunePlan(keep=tuple(kept), delete=tuple(delete), left=tuple(left))


def delete_checkpoints(checkpoints: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Delete *checkpoints*, oldest first; return those that are gone. Raise `NotWritable` for the first one that cannot be deleted.

    An interruption leaves no torn checkpoint: what remains of one is removed when the job starts a generation.
    """
    gone = list[StoredCheckpoint]()
    for one in reversed(checkpoints):
        assert one.manifest is not None, "a complete checkpoint has a manifest"
        try:
            manifest.remove(one.path, one.manifest.generation)
        except FileNotFoundError:  # the job has deleted it meanwhile
            continue
        except OSError as error:
            raise NotWritable("the checkpoint", str(one.path), error.strerror or str(error)) from error
        gone.append(one)
    return gone
