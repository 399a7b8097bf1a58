"""Who may put checkpoints in place: the newest generation of the job that the folder belongs to, as a file in the folder says.

A node that was cut off and given up may still reach the storage, and does not know that others have taken over. Its agent, which is asked
for leave, does not know it either. The storage does: each generation writes its number there when it begins.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

FENCE: Final = ".generation"


def begin(directory: Path, generation: int) -> None:
    """Let *generation* of this process's job be the one that may write in *directory*; an older one of the same job changes nothing.

    Where that cannot be written, no checkpoint can be either.
    """
    job = _job()
    if job is None:
        return
    with suppress(OSError):
        owner, newest = _read(directory)
        if owner == job and newest >= generation:
            return
        directory.mkdir(parents=True, exist_ok=True)
        beside = directory / f"{FENCE}.{os.getpid()}"
        beside.write_text(json.dumps({"job": job, "generation": generation}))
        beside.replace(directory / FENCE)


def refused(directory: Path, generation: int) -> str:
    """Return why *generation* of this process's job may not put anything in place in *directory*; empty when it may."""
    job = _job()
    owner, newest = _read(directory)
    if job is None or owner is None:
        return ""
    if owner != job:
        return f"{directory} belongs to another job now"
    return f"generation {generation} is over: generation {newest} has begun" if newest > generation else ""


def _job() -> str | None:
    """Return what names the job without telling its secret; None without an agent."""
    token = os.environ.get("HOLDFAST_TOKEN")
    return hashlib.sha256(f"fence {token}".encode()).hexdigest()[:16] if token else None


def _read(directory: Path) -> tuple[str | None, int]:
    try:
        facts = json.loads((directory / FENCE).read_text())
        return str(facts["job"]), int(facts["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0
