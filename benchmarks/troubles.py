"""Have ranks of a script that plays along get into trouble at a moment of our choice. For tests and benchmarks; standard library only."""

from __future__ import annotations

import time
from pathlib import Path


def trouble(folder: Path, rank: int, statements: str) -> float:
    """Have *rank* of a script that asks (`troubled`) run *statements* in its next step; return when that was asked (wall clock).

    *folder*: the job's checkpoints. The rank leaves ``troubled-RANK`` there with the time at which it began.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".trouble-{rank}"
    beside.write_text(statements)
    (folder / f"troubled-{rank}").unlink(missing_ok=True)
    beside.replace(folder / f"trouble-{rank}")
    return time.time()


def troubled(folder: Path, rank: int) -> str:
    """Return the statements that somebody wants *rank* to run now, once; nothing where nobody does."""
    asked = folder / f"trouble-{rank}"
    try:
        statements = asked.read_text()
        asked.unlink()
    except FileNotFoundError:
        return ""
    (folder / f"troubled-{rank}").write_text(f"{time.time():.6f}")
    return statements


def troubled_at(folder: Path, rank: int) -> float | None:
    """Return when *rank* began with what it was asked for (wall clock); None before it has."""
    try:
        return float((folder / f"troubled-{rank}").read_text() or 0) or None
    except FileNotFoundError:
        return None
