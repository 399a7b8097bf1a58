"""Find the newest complete checkpoint of a job."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from holdfast.checkpoints.inventory import stored_checkpoints
from holdfast.errors import NoCheckpoint
from holdfast.runtime.checkpoint_verifier.findings import inspect_checkpoint


class CheckpointInfo(BaseModel):
    """A complete checkpoint in the format of `torch.distributed.checkpoint`."""

    model_config = ConfigDict(frozen=True)

    job: str
    path: Path
    """The folder, which `torch.distributed.checkpoint` can read."""
    step: int
    """The last committed step in it."""
    world_size: int
    """Ranks that wrote it."""
    bytes: int
    saved_at: float
    """Seconds since 1970."""
    verified: bool
    """Every file was read and has the SHA-256 in the manifest."""
    rejected: tuple[str, ...] = ()
    """Newer checkpoints that were rejected, and why."""


def latest(directory: Path, job: str, *, verify: bool = True) -> CheckpointInfo:
    """Return the newest complete checkpoint in *directory*; with *verify* read every byte of it first.

    Raise `NoCheckpoint` when there is none, `NotReadable` when the folder cannot be read.
    """
    rejected: list[str] = []
    for found in stored_checkpoints(directory):
        one = inspect_checkpoint(found.path, verify=True) if verify and found.complete else found
        if one.complete:
            assert one.manifest is not None, "a complete checkpoint has a manifest"
            return CheckpointInfo(
                job=job,
                path=one.path.absolute(),
                step=one.step,
                world_size=one.manifest.world_size,
                bytes=one.manifest.size,
                saved_at=one.manifest.time,
                verified=verify,
                rejected=tuple(rejected),
            )
        rejected.append(f"step {one.step} is {one.status}: {one.findings.broken[0]}")
    raise NoCheckpoint(job, str(directory), "; ".join(rejected))
