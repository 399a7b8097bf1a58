"""`holdfast report`."""

from __future__ import annotations

from pathlib import Path

from holdfast.cli.job_view import find_job
from holdfast.cli.output import say, say_json
from holdfast.history.store import History
from holdfast.report import write_report


def report(reference: str | None, output: Path | None, *, as_json: bool) -> int:
    """Write the page about a job."""
    history = History.open(create=False)
    try:
        job = find_job(history, reference)
        page = write_report(history, job, output or Path(f"{job.name}.html"))
    finally:
        history.close()
    if as_json:
        say_json({"job": job.name, "id": job.id, "report": str(page)})
    else:
        say(str(page))
    return 0
