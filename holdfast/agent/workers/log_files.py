"""Read the logs of a job's ranks on this machine, in parts. Standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

AGENT: Final = "agent.log"
"""The agent's own, in the folder of its node."""
NAME: Final = re.compile(r"(?:rank|hot-spare)-\d{1,9}\.log")
"""The only files in the folder that are given away."""
JOB: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")
SHARED: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph-fuse", "cifs", "smb3", "glusterfs", "fuse.glusterfs", "wekafs", "panfs"}
)
"""File systems that machines share, on which all see the same inode numbers."""
MAX_PART: Final = 1 << 20
"""Bytes of one part."""


def folder_of(jobs: Path, job: str) -> Path:
    """Return the folder with the logs of *job* below *jobs*; raise ``ValueError`` for an invalid job name."""
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


def place_of(folder: Path) -> str:
    """Return an identifier of *folder*: the same on machines that share it, another on every other machine; empty where there is none.

    A file system of unknown kind counts as not shared.
    """
    try:
        facts, mounts = folder.stat(), Path("/proc/self/mountinfo").read_text(errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    device = f"{os.major(facts.st_dev)}:{os.minor(facts.st_dev)}"
    return f"{shared_source(mounts, device) or f'{boot} {device}'} {facts.st_ino}"


def shared_source(mounts: str, device: str) -> str:
    """Return the source of the file system *device* in *mounts* (/proc/self/mountinfo) where machines share it; empty otherwise."""
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2:3] == [device]:
            name, source = (*kind.split(), "", "")[:2]
            return source if name in SHARED else ""
    return ""


def read_part(folder: Path, name: str, at: int | None, most: int) -> bytes:
    """Return up to *most* bytes of the log *name*, from byte *at* on or the last ones.

    Raise ``OSError``, or ``ValueError`` for an invalid log name.
    """
    if not NAME.fullmatch(name) and name != AGENT:
        raise ValueError(f"no log is called {name[:80]!r}")
    most = min(most, MAX_PART)
    with (folder / name).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most) if at is None else at)
        return file.read(most)
