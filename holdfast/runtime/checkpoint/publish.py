"""The last steps of a checkpoint: publish it by renaming its folder, unless a newer generation has begun, and remove old ones.

A node that was partitioned and replaced may still reach the storage without knowing that it was replaced; nor does its agent know. The
storage does: each generation writes its number there when it begins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from holdfast.runtime.agent_client import AgentAnswer
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Manifest

FENCE: Final = ".generation"


def put_in_place(written: Manifest, partial: Path, place: Path, ask: Callable[[], AgentAnswer]) -> AgentAnswer:
    """Write the manifest into *partial*, *ask* for permission, and if it is given rename the folder to *place*; return the answer.

    Raise ``OSError`` when a file is not as it was written, or when the file system fails.
    """
    for name, file in written.files.items():
        if not (partial / name).exists() or (partial / name).stat().st_size != file.size:
            raise OSError(errno.EIO, f"rank 0 does not see {name} as it was written: is the checkpoint directory shared by all nodes?")
    (partial / manifest.MANIFEST).write_text(written.text())
    manifest.sync(partial / manifest.MANIFEST)
    manifest.sync(partial)
    answer = ask()
    if answer.ok and (why := fenced_off(place.parent, written.generation)):
        answer = replace(answer, ok=False, why=why)
    if answer.ok:
        if place.exists():  # it was found unusable, else training would have resumed from it
            place.rename(place.with_name(f"{place.name}.unusable-{time.time_ns()}"))
        for path in partial.iterdir():  # files of the writers' rendezvous, and of an earlier attempt with more ranks
            if path.name not in written.files and path.name != manifest.MANIFEST:
                path.unlink()
        partial.rename(place)
        manifest.sync(place.parent)
    return answer


def retire(directory: Path, keep: int, generation: int, *, unusable: Collection[Path] = ()) -> None:
    """Remove complete checkpoints beyond the newest *keep*, not counting those known to be *unusable*; ignore what cannot be removed."""
    with suppress(OSError):
        complete = [path for path in manifest.candidates(directory) if path not in unusable and manifest.looks_complete(path)]
        for path in complete[keep:]:
            manifest.remove(path, generation)


def clear(directory: Path, below: int, *, before: int | None = None) -> None:
    """Remove the staging folders of generations before *below*; with *before* only those of earlier steps."""
    with suppress(OSError):
        for path in manifest.leftovers(directory, below=below):
            if before is None or manifest.step_of(path) < before:
                shutil.rmtree(path, ignore_errors=True)


# -- fencing ------------------------------------------------------------------------------------------------------------


def begin_generation(directory: Path, generation: int) -> None:
    """Let only *generation* of this process's job publish in *directory* from now on; an older one of the same job changes nothing.

    Errors are ignored: where this cannot be written, no checkpoint can be either.
    """
    job = _job()
    if job is None:
        return
    with suppress(OSError):
        owner, newest = _fence(directory)
        if owner == job and newest >= generation:
            return
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"{FENCE}.{os.getpid()}"
        temporary.write_text(json.dumps({"job": job, "generation": generation}))
        temporary.replace(directory / FENCE)


def fenced_off(directory: Path, generation: int) -> str:
    """Return why *generation* of this process's job must not publish in *directory*; empty when it may."""
    job = _job()
    owner, newest = _fence(directory)
    if job is None or owner is None:
        return ""
    if owner != job:
        return f"{directory} belongs to another job now"
    return f"generation {generation} is over: generation {newest} has begun" if newest > generation else ""


def _job() -> str | None:
    """Return an identifier of the job that does not reveal its token; None without an agent."""
    token = os.environ.get("HOLDFAST_TOKEN")
    return hashlib.sha256(f"fence {token}".encode()).hexdigest()[:16] if token else None


def _fence(directory: Path) -> tuple[str | None, int]:
    try:
        facts = json.loads((directory / FENCE).read_text())
        return str(facts["job"]), int(facts["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0
