"""Where files lie. One variable moves all of them: ``HOLDFAST_HOME`` (default ``~/.holdfast``)."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Return the folder that holds everything Holdfast keeps."""
    return Path(os.environ.get("HOLDFAST_HOME") or "~/.holdfast").expanduser().absolute()


def history_url() -> str:
    """Return the history's database URL: ``HOLDFAST_HISTORY``, or SQLite under `home`."""
    return os.environ.get("HOLDFAST_HISTORY") or f"sqlite:///{home() / 'history.db'}"


def job_directory(job: str) -> Path:
    """Return the folder of *job*: its flow's log, its checkpoints unless the job names another place."""
    return home() / "jobs" / job


def make_private(folder: Path) -> None:
    """Make *folder*, which may lie below others that are missing, for this user alone; raise ``OSError`` when that cannot be.

    A folder of a job holds its description, its logs and its token. One that was there before keeps its owner and loses what others may do.
    """
    for one in reversed([folder, *folder.parents]):
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid == os.getuid() and facts.st_mode & 0o077:
        folder.chmod(facts.st_mode & 0o700)


def spill_file(job: str) -> Path:
    """Return the file that takes rows of *job* which the database could not."""
    return job_directory(job) / "history.spill.jsonl"


def cluster_directory(cluster: str) -> Path:
    """Return the folder that holds the nodes of a local *cluster*."""
    return home() / "clusters" / cluster
