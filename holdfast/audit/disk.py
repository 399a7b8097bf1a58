"""The checkpoints in a job's folder: which there are, which are whole, and what is wrong with the others. Nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import NotReadable
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Flaw, Manifest, UnusableCheckpoint


@dataclass(slots=True)
class OnDisk:
    """One checkpoint."""

    path: Path
    step: int
    manifest: Manifest | None = None
    flaw: Flaw | None = None
    broken: list[str] = field(default_factory=list)
    """What is wrong with it."""
    proven: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Tell whether nothing is known against it."""
        return not self.broken

    @property
    def standing(self) -> str:
        """Return ``whole``, ``torn`` or ``corrupt``."""
        return "whole" if self.whole else "torn" if self.flaw == "checkpoint-torn" else "corrupt"


def on_disk(directory: Path, *, verify: bool = False) -> list[OnDisk]:
    """Return the checkpoints in *directory*, newest first; with *verify* every byte of them is read.

    Raise `NotReadable` when the folder is there and cannot be looked into.
    """
    try:
        next(directory.iterdir(), None)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NotReadable("checkpoint directory", str(directory), error.strerror or str(error)) from error
    return [look_at(folder, verify=verify) for folder in manifest.candidates(directory)]


def look_at(folder: Path, *, verify: bool) -> OnDisk:
    """Return what is known of the checkpoint in *folder*; with *verify* every byte of it is read."""
    one = OnDisk(folder, manifest.step_of(folder))
    try:
        one.manifest = manifest.read(folder)
    except UnusableCheckpoint as unusable:
        one.flaw, one.broken = unusable.flaw, [unusable.why]
        return one
    for name, file in sorted(one.manifest.files.items()):
        try:
            if verify:
                manifest.check(folder, name, file)
            else:
                _measure(folder / name, file.size)
        except UnusableCheckpoint as unusable:
            one.flaw = one.flaw or unusable.flaw
            one.broken.append(unusable.why)
    if verify and one.whole:
        one.proven.append(f"all {len(one.manifest.files)} files have the SHA-256 that the manifest names")
    return one


def _measure(path: Path, size: int) -> None:
    """Raise `UnusableCheckpoint` unless there is a file of that *size*."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise UnusableCheckpoint("checkpoint-torn", f"{path.name} is missing") from None
    except OSError as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{path.name} cannot be looked at: {error.strerror}") from error
    if found < size:
        raise UnusableCheckpoint("checkpoint-torn", f"{path.name} is cut off: {found} of {size} bytes")
    if found > size:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{path.name} is longer than it was written: {found} instead of {size} bytes")
