"""Find the newest complete checkpoint with all ranks together, and load it; report those that are not usable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import NOT_INVALIDATED, InvalidatedSteps, Manifest, UnusableCheckpoint
from holdfast.runtime.checkpoint.storage import CheckpointReader
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.state.training import CheckpointMismatch, Training
from holdfast.runtime.world import World


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The newest complete checkpoint, if any, and the newer ones that are not usable."""

    folder: Path | None
    manifest: Manifest | None
    skipped: tuple[Path, ...]


def newest_complete(directory: Path, world: World, invalidated: InvalidatedSteps = NOT_INVALIDATED) -> FoundCheckpoint:
    """Return the newest checkpoint below *directory* that is unchanged in every byte and not *invalidated*; called by all ranks together.

    Rank 0 lists the folders, because a shared file system may show them to other ranks later; each rank checks its share of the files.
    Raise rank 0's ``OSError`` on every rank when it cannot list them: to start from nothing would lose work.
    """
    skipped: list[Path] = []
    listed = world.broadcast(_list_candidates(directory) if world.rank == 0 else None)
    if "error" in listed:
        raise OSError(*listed["error"])
    for one in listed["found"]:
        folder = Path(one["folder"])
        found = None if one["manifest"] is None else Manifest.from_json(one["manifest"])
        if found is not None and invalidated.covers(found.step, found.generation):
            skipped.append(folder)
            continue
        error = one["flaw"]
        if found is not None:
            error = next((each for each in world.gather(_check_share(folder, found, world)) if each is not None), None)
        if error is None:
            return FoundCheckpoint(folder, found, tuple(skipped))
        skipped.append(folder)
        if world.rank == 0:
            StorageErrorReporter().report(StorageError(*error), manifest.step_of(folder), folder)
    return FoundCheckpoint(None, None, tuple(skipped))


def _list_candidates(directory: Path) -> dict[str, Any]:
    """Return the checkpoints in *directory*, newest first, each with its manifest or its flaw, or why it cannot be listed; as JSON."""
    found: list[Mapping[str, Any]] = []
    try:
        for folder in manifest.candidates(directory):
            try:
                found.append({"folder": str(folder), "manifest": asdict(manifest.read(folder)), "flaw": None})
            except UnusableCheckpoint as unusable:
                found.append({"folder": str(folder), "manifest": None, "flaw": [unusable.flaw, unusable.why]})
    except OSError as error:
        return {"error": [error.errno, error.strerror, str(directory)]}
    return {"found": found}


def _check_share(folder: Path, found: Manifest, world: World) -> list[str] | None:
    """Check this rank's share of the files in *folder*; return kind and reason of the first flaw."""
    try:
        for name, file in manifest.share(found.files, world.rank, world.size):
            manifest.check(folder, name, file)
    except UnusableCheckpoint as unusable:
        return [unusable.flaw, unusable.why]
    return None


def load(training: Training, folder: Path, world: World) -> dict[str, Any]:
    """Load the complete checkpoint in *folder* into *training* and return its progress; called by all ranks together.

    Raise `CheckpointMismatch` on every rank when it does not fit on any of them.
    """
    progress, why = None, None
    try:
        progress = training.load(CheckpointReader(folder), world.rank)
    except Exception as error:  # noqa: BLE001 (any error of one rank must reach all, or they wait for it forever)
        why = f"{type(error).__name__}: {error}"
    first = next((one for one in world.gather(why) if one is not None), None)
    if progress is None or first is not None:
        raise CheckpointMismatch(
            f"{folder} is complete, but it is not a checkpoint of this job: {first}. "
            "Restore the model and optimizer that wrote it, or name another checkpoint directory."
        )
    return progress
