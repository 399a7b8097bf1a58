"""`holdfast admin support-bundle`: pack what somebody who helps needs to see."""

from __future__ import annotations

import re
import time
from contextlib import closing
from pathlib import Path

from holdfast import paths
from holdfast.agent.workers.log_files import JOB
from holdfast.cli.job_view import find_job
from holdfast.cli.output import echo, echo_json, hint
from holdfast.errors import HistoryError, UnknownJob
from holdfast.history.store import History
from holdfast.support.bundle import write


def support_bundle(job: str | None, output: Path | None, *, as_json: bool) -> int:
    """Write the bundle, and show its path and what is missing in it."""
    known = None if job is None else _name_of(job)
    name = re.sub(r"[^\w.-]", "_", known or "all")[:60]
    path = output or Path(f"holdfast-support-{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.tar.gz")
    missing = write(path, known)
    if as_json:
        echo_json({"bundle": str(path), "bytes": path.stat().st_size, "missing": missing})
        return 0
    for one in missing:
        hint(f"not in the bundle: {one}")
    hint("Secrets were removed; check the bundle before you send it to somebody.")
    echo(str(path))
    return 0


def _name_of(job: str) -> str:
    """Return the name of the job that is meant; raise `UnknownJob` if it is unknown on this machine."""
    try:
        with closing(History.open(create=False)) as history:
            return find_job(history, job).name
    except HistoryError:  # an unreadable history is a reason for a bundle
        return job
    except UnknownJob:
        if JOB.fullmatch(job) and paths.job_directory(job).is_dir():  # it failed before the history had it
            return job
        raise
