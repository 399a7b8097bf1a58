"""The newest checkpoint of a job that is whole."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from holdfast.checkpoints.inventory import stored_checkpoints
from holdfast.errors import NoCheckpoint
from holdfast.runtime.checkpoint_verifier.files import StoredCheckpoint, inspect_checkpoint


class CheckpointInfo(BaseModel):
    """A checkpoint in the format of `torch.distributed.checkpoint`, all files of which are there in full size."""

    model_config = ConfigDict(frozen=True)

    job: str
    path: Path
    """The folder; `torch.distributed.checkpoint` reads it."""
    step: int
    """Steps done when it was taken."""
    world_size: int
    """Ranks that wrote it."""
    bytes: int
    saved_at: float
    """Seconds since 1970."""
    verified: bool
    """Every file was read, and has the SHA-256 that the manifest names."""
    rejected: tuple[str, ...] = ()
    """Newer checkpoints that were passed over, and why."""


def latest(directory: Path, job: str, *, verify: bool = True) -> CheckpointInfo:
    """Return the newest whole checkpoint in *directory*; with *verify* read every byte of it first.

    Raise `NoCheckpoint` when there is none, `NotReadable` when the folder cannot be read.
    """
    rejected: list[str] = []
    for found in stored_checkpoints(directory):
        one = inspect_checkpoint(found.path, verify=True) if verify and found.complete else found
        if one.complete:
            return _info(one, job, verified=verify, rejected=tuple(rejected))
        rejected.append(f"step {one.step} is {one.status}: {one.findings.broken[0]}")
    raise NoCheckpoint(job, str(directory), "; ".join(rejected))


def _info(one: StoredCheckpoint, job: str, *, verified: bool, rejected: tuple[str, ...]) -> CheckpointInfo:
    assert one.manifest is not None, "what is whole has a manifest"
    return CheckpointInfo(
        job=job,
        path=one.path.absolute(),
        step=one.step,
        world_size=one.manifest.world_size,
        bytes=one.manifest.size,
        saved_at=one.manifest.time,
        verified=verified,
        rejected=rejected,
    )
