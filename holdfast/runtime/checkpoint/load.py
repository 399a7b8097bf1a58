"""Find the newest whole checkpoint, all ranks together, and say what is wrong with those that are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.invalidated import NOTHING, WrittenOff
from holdfast.runtime.checkpoint.manifest import Manifest, UnusableCheckpoint
from holdfast.runtime.checkpoint.storage import CheckpointReader
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.state.training import CheckpointMismatch, Training
from holdfast.runtime.world import World

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The newest whole checkpoint, if any, and the unusable ones that are newer."""

    folder: Path | None
    manifest: Manifest | None
    skipped: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A folder named as a checkpoint, with its manifest or what is wrong with it."""

    folder: Path
    manifest: Manifest | None
    storage_error: StorageError | None

    def record(self) -> dict[str, Any]:
        """Return it in values that JSON can hold."""
        whole = None if self.manifest is None else asdict(self.manifest)
        return {"folder": str(self.folder), "manifest": whole, "storage_error": _words(self.storage_error)}

    @classmethod
    def told(cls, record: Mapping[str, Any]) -> _Candidate:
        """Return what another rank's *record* says."""
        whole = record["manifest"]
        return cls(Path(record["folder"]), None if whole is None else Manifest.told(whole), StorageError.told(record["storage_error"]))


def newest_whole(directory: Path, world: World, off: WrittenOff = NOTHING) -> FoundCheckpoint:
    """Return the newest checkpoint below *directory* whose every byte is as it was written, and that is not written *off*.

    Rank 0 says which folders there are, for a shared file system may show them to others later; each rank then checks its
    share of the files.
    """
    skipped: list[Path] = []
    for candidate in _listed(world.told(_candidates(directory) if world.rank == 0 else None)):
        if candidate.manifest is not None and off.covers(candidate.manifest.step, candidate.manifest.generation):
            skipped.append(candidate.folder)
            continue
        storage_error = candidate.storage_error or StorageError.told(_first(world.gather(_words(_trouble_in_share(candidate, world)))))
        if storage_error is None:
            return FoundCheckpoint(candidate.folder, candidate.manifest, tuple(skipped))
        skipped.append(candidate.folder)
        if world.rank == 0:
            StorageErrorReporter().tell(storage_error, manifest.step_of(candidate.folder), candidate.folder)
    return FoundCheckpoint(None, None, tuple(skipped))


def load(training: Training, folder: Path, world: World) -> dict[str, Any]:
    """Load the whole checkpoint in *folder* into *training*; raise `CheckpointMismatch` on every rank when it fits not on any."""
    progress, why = _attempt(training, folder, world)
    first = _first(world.gather(why))
    if progress is None or first is not None:
        raise CheckpointMismatch(
            f"{folder} is whole, but it is not a checkpoint of this job: {first}. "
            "Restore the model and optimizer that wrote it, or name another checkpoint directory."
        )
    return progress


def _attempt(training: Training, folder: Path, world: World) -> tuple[dict[str, Any] | None, str | None]:
    """Load on this rank; return the progress, or why not."""
    try:
        return training.load(CheckpointReader(folder), world.rank), None
    except Exception as error:  # noqa: BLE001 (whatever one rank meets, all must hear of it, or they wait for it in vain)
        return None, f"{type(error).__name__}: {error}"


def _candidates(directory: Path) -> dict[str, Any]:
    """Return what *directory* holds, newest first, or why it cannot be listed, in values that JSON can hold."""
    try:
        return {"found": [_candidate(folder).record() for folder in manifest.candidates(directory)]}
    except OSError as error:
        return {"refused": [error.errno, error.strerror, str(directory)]}


def _listed(told: Mapping[str, Any]) -> list[_Candidate]:
    """Return what rank 0 has found; raise its ``OSError`` on every rank.

    Going on from nothing because a folder cannot be listed would throw work away.
    """
    if "refused" in told:
        raise OSError(*told["refused"])
    return [_Candidate.told(one) for one in told["found"]]


def _words(storage_error: StorageError | None) -> list[str] | None:
    """Return a trouble as JSON holds it."""
    return None if storage_error is None else [storage_error.kind, storage_error.why]


def _candidate(folder: Path) -> _Candidate:
    """Read the manifest in *folder*."""
    try:
        return _Candidate(folder, manifest.read(folder), None)
    except UnusableCheckpoint as unusable:
        return _Candidate(folder, None, StorageError(unusable.flaw, unusable.why))


def _trouble_in_share(candidate: _Candidate, world: World) -> StorageError | None:
    """Check this rank's share of the files of *candidate*."""
    assert candidate.manifest is not None
    try:
        for name, file in manifest.share(candidate.manifest.files, world.rank, world.size):
            manifest.check(candidate.folder, name, file)
    except UnusableCheckpoint as unusable:
        return StorageError(unusable.flaw, unusable.why)
    return None


def _first(values: list[T | None]) -> T | None:
    """Return the first value that is one."""
    return next((value for value in values if value is not None), None)
