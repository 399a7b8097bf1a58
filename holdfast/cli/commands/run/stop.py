"""`holdfast stop`: stop a job and wait for its end."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Final

from holdfast.cli.job_view import JobView, find_job, view_job
from holdfast.cli.output import echo, echo_json, hint
from holdfast.cli.watch import request_stop
from holdfast.errors import JobAlreadyRunning
from holdfast.exit_codes import FAILED
from holdfast.history import queries
from holdfast.history.lease import holder_of
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.report.text.wording import duration

POLL_INTERVAL: Final = 0.1


def stop(job: str, *, timeout: float | None, as_json: bool) -> int:
    """Stop a job and wait for its end."""
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        if queries.has_ended(history, row.id):
            return _show(view_job(history, row), "had already ended", as_json=as_json)
        request_stop(history, row)
        if not as_json:
            hint(f"requested a stop of job '{row.name}'")
        if not _wait(history, row, timeout):
            hint(f"job '{row.name}' has not ended within {duration(timeout)} of the request; `holdfast status {row.name}` shows its state")
            return FAILED
        return _show(view_job(history, row), "ended", as_json=as_json)


def _wait(history: History, job: Job, timeout: float | None) -> bool:
    """Wait until the job has ended with all its processes; end a job without a controller from here."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        over, controlled = queries.has_ended(history, job.id), holder_of(history, job.id) is not None
        if not controlled and over:
            return True
        if not controlled:
            from holdfast.control.supervisor.supervise import stop_without_controller  # noqa: PLC0415 (not needed where a controller stops the job)

            try:
                stop_without_controller(job)
            except JobAlreadyRunning:  # a controller has just reattached, and reads the request
                time.sleep(POLL_INTERVAL)
        elif deadline is not None and time.monotonic() > deadline:
            return False
        else:
            time.sleep(POLL_INTERVAL)


def _show(view: JobView, what: str, *, as_json: bool) -> int:
    if as_json:
        echo_json(view.as_record())
    else:
        echo(f"job '{view.job.name}' {what}: {view.state}, {view.reason}")
    return 0
