"""`holdfast support-bundle`: what somebody who helps needs to see."""

from __future__ import annotations

import re
import time
from pathlib import Path

from holdfast import paths
from holdfast.agent.workers.log_files import JOB
from holdfast.cli.job_view import find_job
from holdfast.cli.output import hint, say, say_json
from holdfast.errors import HistoryError, UnknownJob
from holdfast.history.store import History
from holdfast.support.bundle import write


def support_bundle(job: str | None, output: Path | None, *, as_json: bool) -> int:
    """Write the bundle and tell where it is, and what is missing in it."""
    known = None if job is None else _known(job)
    name = re.sub(r"[^\w.-]", "_", known or "all")[:60]
    path = output or Path(f"holdfast-support-{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.tar.gz")
    missing = write(path, known)
    if as_json:
        say_json({"bundle": str(path), "bytes": path.stat().st_size, "missing": missing})
        return 0
    for one in missing:
        hint(f"not in it: {one}")
    hint("Secrets were taken out; have a look at it before you send it to somebody.")
    say(str(path))
    return 0


def _known(job: str) -> str:
    """Return the name of the job that is meant; raise `UnknownJob` where nothing here knows it."""
    try:
        history = History.open(create=False)
        try:
            return find_job(history, job).name
        finally:
            history.close()
    except HistoryError:  # a history that cannot be read is a reason for a bundle, not against one
        return job
    except UnknownJob:
        if JOB.fullmatch(job) and paths.job_directory(job).is_dir():  # it never came so far
            return job
        raise
