"""The last acts of a checkpoint: put in place as a whole, and older ones removed."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from holdfast.runtime.agent_client import Leave
from holdfast.runtime.checkpoint import fencing, manifest
from holdfast.runtime.checkpoint.manifest import Manifest


def put_in_place(whole: Manifest, partial: Path, place: Path, ask: Callable[[], Leave]) -> Leave:
    """Write the manifest into *partial*, *ask* for leave, and if it is given rename the folder to *place*; return the answer.

    Raise ``OSError`` when a file is not as it was written, or when the disk does not do as it is told.
    """
    for name, file in whole.files.items():
        if not (partial / name).exists() or (partial / name).stat().st_size != file.size:
            raise OSError(errno.EIO, f"rank 0 does not see {name} as it was written: is the checkpoint directory shared by all nodes?")
    (partial / manifest.MANIFEST).write_text(whole.text())
    manifest.sync(partial / manifest.MANIFEST)
    manifest.sync(partial)
    leave = ask()
    if leave.ok and (why := fencing.refused(place.parent, whole.generation)):
        leave = replace(leave, ok=False, why=why)
    if leave.ok:
        if place.exists():  # found unusable, else training would have gone on after it
            place.rename(place.with_name(f"{place.name}.unusable-{time.time_ns()}"))
        for path in partial.iterdir():  # notes by which the writers met, and what an earlier try with more ranks left
            if path.name not in whole.files and path.name != manifest.MANIFEST:
                path.unlink()
        partial.rename(place)
        manifest.sync(place.parent)
    return leave


def retire(directory: Path, keep: int, generation: int, *, unusable: Collection[Path] = ()) -> None:
    """Remove whole checkpoints beyond the newest *keep*, those known to be *unusable* not counted; what cannot be removed stays."""
    with suppress(OSError):
        sound = [path for path in manifest.candidates(directory) if path not in unusable and manifest.looks_complete(path)]
        for path in sound[keep:]:
            away = manifest.beside(directory, manifest.step_of(path), "removing", generation)
            path.rename(away)  # first, so that a kill in the middle leaves no torn checkpoint
            shutil.rmtree(away)


def clear(directory: Path, below: int, *, before: int | None = None) -> None:
    """Remove what generations before *below* left half written or half removed; only of steps *before* that one, where it is named."""
    with suppress(OSError):
        for path in manifest.leftovers(directory, below=below):
            if before is None or manifest.step_of(path) < before:
                shutil.rmtree(path, ignore_errors=True)
