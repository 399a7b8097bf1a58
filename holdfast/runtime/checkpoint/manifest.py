"""The manifest of a checkpoint: what belongs to it, and how to tell that all of it is there unchanged.

A checkpoint is a folder ``step-00000100``. It is written as ``.step-00000100.partial-<generation>``, its manifest last,
and renamed when all is on the disk: a folder without a whole manifest is no checkpoint.
Standard library only: the command line reads manifests too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.runtime.checkpoint.invalidated import NOTHING, WrittenOff

FORMAT: Final = 1
"""Version of the manifest and of the tensors' keys."""

MANIFEST: Final = "manifest.json"

_WHOLE: Final = re.compile(r"step-(\d{8,})")
_STEP: Final = re.compile(r"step-(\d{8,})")
_BESIDE: Final = re.compile(r"\.step-\d{8,}\.(?P<what>partial|removing)-(?P<generation>\d+)")

Flaw = Literal["checkpoint-torn", "checkpoint-corrupt"]


class UnusableCheckpoint(Exception):
    """A checkpoint that must not be loaded: its *flaw* and *why*."""

    def __init__(self, flaw: Flaw, why: str) -> None:
        super().__init__(flaw, why)
        self.flaw, self.why = flaw, why


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file as it was handed to the disk: its *size* in bytes and its *sha256*."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What stands in ``manifest.json``."""

    step: int
    generation: int
    world_size: int
    files: Mapping[str, WrittenFile]
    time: float
    torch: str

    @classmethod
    def told(cls, values: Mapping[str, Any]) -> Manifest:
        """Return the manifest with these *values*, as JSON has them; raise ``KeyError``, ``TypeError`` and the like when they are none."""
        files = {name: WrittenFile(**file) for name, file in values["files"].items()}
        return cls(**{**values, "files": files})

    @property
    def size(self) -> int:
        """All files together, in bytes."""
        return sum(file.size for file in self.files.values())

    def text(self) -> str:
        """Return the file's text; it holds the digest of its own body."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "sha256": _digest_of(body)}, indent=1) + "\n"


def manifest(step: int, generation: int, world_size: int, files: Mapping[str, WrittenFile]) -> Manifest:
    """Make the manifest of a checkpoint that was just written."""
    import torch  # noqa: PLC0415 (who only reads manifests starts without it)

    return Manifest(step=step, generation=generation, world_size=world_size, files=files, time=time.time(), torch=str(torch.__version__))


def folder_of(directory: Path, step: int) -> Path:
    """Return where the checkpoint of *step* stands once it is whole."""
    return directory / f"step-{step:08d}"


def beside(directory: Path, step: int, what: Literal["partial", "removing"], generation: int) -> Path:
    """Return the hidden folder in which the checkpoint of *step* is written, or from which it is removed."""
    return directory / f".step-{step:08d}.{what}-{generation}"


def candidates(directory: Path) -> list[Path]:
    """Return all folders that are named as checkpoints, newest first."""
    if not directory.is_dir():
        return []
    found = ((int(match[1]), path) for path in directory.iterdir() if (match := _WHOLE.fullmatch(path.name)))
    return [path for _, path in sorted(found, reverse=True)]


def leftovers(directory: Path, *, below: int) -> list[Path]:
    """Return what generations before *below* left half written or half removed."""
    found = ((_BESIDE.fullmatch(path.name), path) for path in directory.iterdir())
    return [path for match, path in found if match and int(match["generation"]) < below]


def step_of(folder: Path) -> int:
    """Return the step of a folder that is named as a checkpoint, or lies `beside` one."""
    match = _STEP.search(folder.name)
    assert match is not None
    return int(match[1])


def complete_steps(directory: Path, off: WrittenOff = NOTHING) -> Iterator[int]:
    """Yield the steps of the checkpoints below *directory* that look whole, newest first; each is looked at when its turn comes.

    Those that are written *off* do not count.
    """
    return (step_of(folder) for folder in candidates(directory) if looks_complete(folder) and not is_off(folder, off))


def is_off(folder: Path, off: WrittenOff) -> bool:
    """Tell whether the checkpoint in *folder* is written off; one that cannot be read is not."""
    try:
        return bool(off.ranges) and off.covers(step_of(folder), read(folder).generation)
    except UnusableCheckpoint:
        return False


def read(folder: Path) -> Manifest:
    """Return the manifest in *folder*; raise `UnusableCheckpoint` when it is not whole, not unchanged or not of a known format."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise UnusableCheckpoint("checkpoint-torn", f"it has no {MANIFEST}") from None
    except OSError as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableCheckpoint("checkpoint-torn", f"its {MANIFEST} is not whole") from error
    try:
        return _checked(values, folder)
    except (RecursionError, ValueError) as error:  # nested as no manifest is, or with half a character
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} is not a manifest") from error


def _checked(values: Any, folder: Path) -> Manifest:  # noqa: ANN401 (whatever JSON a file may hold)
    """Return the manifest that *values* are."""
    if not isinstance(values, dict) or "format" not in values:
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} is not a manifest")
    if values["format"] != FORMAT:
        why = f"its format {values['format']!r} is not the one known here ({FORMAT}); a newer Holdfast may have written it"
        raise UnusableCheckpoint("checkpoint-corrupt", why)
    if values.pop("sha256", None) != _digest_of(values):
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} was changed")
    del values["format"]
    try:
        whole = Manifest.told(values)
    except (AttributeError, KeyError, TypeError) as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} is not a manifest") from error
    if any("/" in name for name in whole.files):
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} names files outside of it")
    names = folder_of(folder.parent, whole.step), beside(folder.parent, whole.step, "partial", whole.generation)
    if folder not in names:
        raise UnusableCheckpoint("checkpoint-corrupt", f"its {MANIFEST} is that of step {whole.step}")
    return whole


def check(folder: Path, name: str, wanted: WrittenFile) -> None:
    """Read one file of a checkpoint and raise `UnusableCheckpoint` unless it is what the manifest says."""
    try:
        with (folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < wanted.size:
                raise UnusableCheckpoint("checkpoint-torn", f"{name} is cut off: {size} of {wanted.size} bytes")
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UnusableCheckpoint("checkpoint-torn", f"{name} is missing") from None
    except OSError as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{name} cannot be read: {error.strerror}") from error
    if found != wanted.sha256:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{name} was changed: its SHA-256 is not the one in the manifest")


def check_size(folder: Path, name: str, wanted: WrittenFile) -> None:
    """Raise `UnusableCheckpoint` unless a file of a checkpoint is there in the size that the manifest says; it is not read."""
    try:
        found = (folder / name).stat().st_size
    except FileNotFoundError:
        raise UnusableCheckpoint("checkpoint-torn", f"{name} is missing") from None
    except OSError as error:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{name} cannot be looked at: {error.strerror}") from error
    if found < wanted.size:
        raise UnusableCheckpoint("checkpoint-torn", f"{name} is cut off: {found} of {wanted.size} bytes")
    if found > wanted.size:
        raise UnusableCheckpoint("checkpoint-corrupt", f"{name} is longer than it was written: {found} instead of {wanted.size} bytes")


def looks_complete(folder: Path) -> bool:
    """Say whether *folder* has a sound manifest and all files in their sizes, without reading them."""
    try:
        for name, file in read(folder).files.items():
            check_size(folder, name, file)
    except UnusableCheckpoint:
        return False
    return True


def share(files: Mapping[str, WrittenFile], rank: int, size: int) -> Iterable[tuple[str, WrittenFile]]:
    """Return the files that *rank* of *size* ranks checks: about the same number of bytes for each."""
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
    """Return the SHA-256 of a manifest's body in its one canonical spelling."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
