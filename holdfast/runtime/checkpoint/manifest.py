"""The manifest of a checkpoint: the files that belong to it, and whether all of them are there unchanged.

A checkpoint is a folder ``step-00000100``. It is written as ``.step-00000100.partial-<generation>``, its manifest last, and renamed once
everything is on disk: a folder without a complete manifest is not a checkpoint. A complete checkpoint may still be invalidated: the
controller has found that training is wrong from some step on.
Standard library only: the command line reads manifests too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

FORMAT: Final = 1
"""Version of the manifest and of the tensors' keys."""

MANIFEST: Final = "manifest.json"
_FOLDER: Final = re.compile(r"step-(\d{8,})")
_STAGING: Final = re.compile(r"\.step-\d{8,}\.(?P<what>partial|removing)-(?P<generation>\d+)")

Flaw = Literal["checkpoint-torn", "checkpoint-corrupt"]


class UnusableCheckpoint(Exception):
    """A checkpoint that must not be loaded: its *flaw* and *why*."""

    def __init__(self, flaw: Flaw, why: str) -> None:
        super().__init__(flaw, why)
        self.flaw, self.why = flaw, why


@dataclass(frozen=True, slots=True)
class InvalidatedSteps:
    """States from which training must not resume although they are complete, and steps whose batches are skipped.

    A state is identified by its step and by the generation that made it, so that the same step counts when it is done again.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    """(step, generation): states of this step and later ones, made by generations before this one."""
    skip: frozenset[int] = frozenset()
    """Steps that are done with later batches than their own."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return what the controller has set: ``STEP:GENERATION,...``, and the steps to be skipped."""
        pairs = (one.split(":") for one in environment.get("HOLDFAST_INVALIDATED", "").split(",") if one)
        skip = (int(one) for one in environment.get("HOLDFAST_SKIP_STEPS", "").split(",") if one)
        return cls(tuple((int(step), int(number)) for step, number in pairs), frozenset(skip))

    def covers(self, step: int, generation: int) -> bool:
        """Return whether the state after *step* that *generation* made is invalidated."""
        return any(step >= first and generation < number for first, number in self.ranges)

    def skipped_before(self, step: int) -> int:
        """Return how many steps' batches are skipped before *step*: those of all consecutive skipped steps, at the first of them."""
        if step - 1 in self.skip:
            return 0
        end = step
        while end in self.skip:
            end += 1
        return end - step


NOT_INVALIDATED: Final = InvalidatedSteps()


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file as it was written: its *size* in bytes and its *sha256*."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int
    generation: int
    world_size: int
    files: Mapping[str, WrittenFile]
    time: float
    torch: str

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Manifest:
        """Return the manifest with these *values* from JSON; raise ``KeyError``, ``TypeError`` or ``AttributeError`` for invalid ones."""
        files = {name: WrittenFile(**file) for name, file in values["files"].items()}
        return cls(**{**values, "files": files})

    @property
    def size(self) -> int:
        """Return the size of all files together, in bytes."""
        return sum(file.size for file in self.files.values())

    def text(self) -> str:
        """Return the text of the file, which contains the digest of its own body."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "sha256": _digest_of(body)}, indent=1) + "\n"


def manifest(step: int, generation: int, world_size: int, files: Mapping[str, WrittenFile]) -> Manifest:
    """Create the manifest of a checkpoint that was just written."""
    import torch  # noqa: PLC0415 (reading manifests does not need it)

    return Manifest(step=step, generation=generation, world_size=world_size, files=files, time=time.time(), torch=str(torch.__version__))


def folder_of(directory: Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of *step*."""
    return directory / f"step-{step:08d}"


def staging_folder(directory: Path, step: int, what: Literal["partial", "removing"], generation: int) -> Path:
    """Return the hidden folder in which the checkpoint of *step* is written, or from which it is removed."""
    return directory / f".step-{step:08d}.{what}-{generation}"


def remove(folder: Path, generation: int) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill in the middle leaves no torn checkpoint. Raise `OSError` if it cannot be."""
    away = staging_folder(folder.parent, step_of(folder), "removing", generation)
    folder.rename(away)
    shutil.rmtree(away)


def candidates(directory: Path) -> list[Path]:
    """Return all folders with the name of a checkpoint, newest first."""
    if not directory.is_dir():
        return []
    found = ((int(match[1]), path) for path in directory.iterdir() if (match := _FOLDER.fullmatch(path.name)))
    return [path for _, path in sorted(found, reverse=True)]


def leftovers(directory: Path, *, below: int) -> list[Path]:
    """Return the staging folders of generations before *below*."""
    found = ((_STAGING.fullmatch(path.name), path) for path in directory.iterdir())
    return [path for match, path in found if match and int(match["generation"]) < below]


def removed_in_part(directory: Path) -> list[Path]:
    """Return the folders of checkpoints whose removal was interrupted; none where *directory* does not exist."""
    if not directory.is_dir():
        return []
    found = ((_STAGING.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(path for match, path in found if match and match["what"] == "removing")


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder or staging folder."""
    match = _FOLDER.search(folder.name)
    assert match is not None
    return int(match[1])


def complete_steps(directory: Path, invalidated: InvalidatedSteps = NOT_INVALIDATED) -> Iterator[int]:
    """Yield the steps of the checkpoints below *directory* that look complete and are not *invalidated*, newest first.

    Each one is checked when it is yielded.
    """
    for folder in candidates(directory):
        if not looks_complete(folder):
            continue
        try:
            excluded = bool(invalidated.ranges) and invalidated.covers(step_of(folder), read(folder).generation)
        except UnusableCheckpoint:
            excluded = False
        if not excluded:
            yield step_of(folder)


def read(folder: Path) -> Manifest:
    """Return the manifest in *folder*; raise `UnusableCheckpoint` when it is incomplete, changed or of an unknown format."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise UnusableCheckpoint("checkpoint-torn", f"it has no {MANIFEST}") from None
    except OSError as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableCheckpoint("checkpoint-torn", f"its {MANIFEST} is not complete") from error
    try:
        return _checked(values, folder)
    except (RecursionError, ValueError) as error:  # nested too deeply, or half a character
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} is not a manifest") from error


def _checked(values: Any, folder: Path) -> Manifest:  # noqa: ANN401 (whatever JSON a file may hold)
    """Return the manifest with these *values*; raise `UnusableCheckpoint` when they are not valid for *folder*."""
    if not isinstance(values, dict) or "format" not in values:
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} is not a manifest")
    if values["format"] != FORMAT:
        why = f"its format {values['format']!r} is not the one known here ({FORMAT}); a newer Holdfast may have written it"
        raise UnusableCheckpoint("checkpoint-corrupt", why)
    if values.pop("sha256", None) != _digest_of(values):
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} was changed")
    del values["format"]
    try:
        found = Manifest.from_json(values)
    except (AttributeError, KeyError, TypeError) as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} is not a manifest") from error
    if any("/" in name for name in found.files):
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} names files outside of it")
    if folder not in (folder_of(folder.parent, found.step), staging_folder(folder.parent, found.step, "partial", found.generation)):
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} is that of step {found.step}")
    return found


def check(folder: Path, name: str, expected: WrittenFile) -> None:
    """Read one file of a checkpoint; raise `UnusableCheckpoint` unless it is as the manifest says."""
    try:
        with (folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < expected.size:
                raise UnusableCheckpoint("checkpoint-torn", f"{name} is cut off: {size} of {expected.size} bytes")
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UnusableCheckpoint("checkpoint-torn", f"{name} is missing") from None
    except OSError as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{name} cannot be read: {error.strerror}") from error
    if found != expected.sha256:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{name} was changed: its SHA-256 is not the one in the manifest")


def check_size(folder: Path, name: str, expected: WrittenFile) -> None:
    """Raise `UnusableCheckpoint` unless a file of a checkpoint has the size in the manifest; it is not read."""
    try:
        found = (folder / name).stat().st_size
    except FileNotFoundError:
        raise UnusableCheckpoint("checkpoint-torn", f"{name} is missing") from None
    except OSError as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{name} cannot be accessed: {error.strerror}") from error
    if found < expected.size:
        raise UnusableCheckpoint("checkpoint-torn", f"{name} is cut off: {found} of {expected.size} bytes")
    if found > expected.size:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{name} is longer than it was written: {found} instead of {expected.size} bytes")


def looks_complete(folder: Path) -> bool:
    """Return whether *folder* has a valid manifest and all files in their sizes, without reading them."""
    try:
        for name, file in read(folder).files.items():
            check_size(folder, name, file)
    except UnusableCheckpoint:
        return False
    return True


def share(files: Mapping[str, WrittenFile], rank: int, size: int) -> Iterable[tuple[str, WrittenFile]]:
    """Yield the files that *rank* of *size* ranks checks: about the same number of bytes for each."""
    loads = [0] * size
    for name, file in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += file.size + 1
        if lightest == rank:
            yield name, file


def sync(path: Path) -> None:
    """Wait until the file or folder at *path* is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of(body: Mapping[str, object]) -> str:
    """Return the SHA-256 of a manifest's body in its canonical form."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
