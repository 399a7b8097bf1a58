"""The logs of a job's ranks on this machine, read in pieces. Standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

AGENT: Final = "agent.log"
"""The agent's own, in the folder of its node."""
NAME: Final = re.compile(r"(?:rank|standby)-\d{1,9}\.log")
"""The files that are given away: nothing else that may lie beside them."""
JOB: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")
MOST: Final = 1 << 20
"""Bytes of one piece."""


def folder_of(jobs: Path, job: str) -> Path:
    """Return the folder with the logs of *job* below *jobs*; raise ``ValueError`` for what is no job's name."""
    if not JOB.fullmatch(job):
        raise ValueError(f"no job is called {job[:80]!r}")
    return jobs / job / "logs"


def listed(folder: Path) -> dict[str, int]:
    """Return the logs in *folder* and their sizes in bytes; none where there is no such folder."""
    try:
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_file()]
        return {path.name: path.stat().st_size for path in sorted(found)}
    except FileNotFoundError:
        return {}


def piece(folder: Path, name: str, at: int | None, most: int) -> bytes:
    """Return up to *most* bytes of the log *name*, from byte *at* on or the last ones.

    Raise ``OSError``, or ``ValueError`` for what is no log's name.
    """
    if not NAME.fullmatch(name) and name != AGENT:
        raise ValueError(f"no log is called {name[:80]!r}")
    most = min(most, MOST)
    with (folder / name).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most) if at is None else at)
        return file.read(most)
