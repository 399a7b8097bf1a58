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


def cluster_directory(cluster: str) -> Path:
    """Return the folder that holds the nodes of a local *cluster*."""
    return home() / "clusters" / cluster
