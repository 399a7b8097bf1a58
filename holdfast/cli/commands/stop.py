"""`holdfast stop`."""

from __future__ import annotations

import time
from typing import Final

from holdfast.cli.job_view import JobView, find_job, look
from holdfast.cli.output import hint, say, say_json
from holdfast.cli.watch import request_stop
from holdfast.errors import JobAlreadyRunning
from holdfast.history import queries
from holdfast.history.lease import holder_of
from holdfast.history.models import Job
from holdfast.history.store import History

POLL: Final = 0.1
TOO_LONG: Final = 1
"""Exit status when the job had not ended in time."""


def stop(reference: str, *, timeout: float | None, as_json: bool) -> int:
    """Stop a job and wait for its end."""
    history = History.open(create=False)
    try:
        job = find_job(history, reference)
        if queries.has_ended(history, job.id):
            return _tell(look(history, job), "had ended already", as_json=as_json)
        request_stop(history, job)
        if not as_json:
            hint(f"asked job '{job.name}' to stop")
        if not _ended(history, job, timeout):
            hint(f"job '{job.name}' was asked to end and has not within {timeout:g} s; `holdfast status {job.name}` shows how far it is")
            return TOO_LONG
        return _tell(look(history, job), "ended", as_json=as_json)
    finally:
        history.close()


def _ended(history: History, job: Job, timeout: float | None) -> bool:
    """Wait until the job has ended with all its processes; a job that no flow steers is ended from here."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        over, steered = queries.has_ended(history, job.id), holder_of(history, job.id) is not None
        if not steered and over:
            return True
        if not steered:
            _end_abandoned(job)
        elif deadline is not None and time.monotonic() > deadline:
            return False
        else:
            time.sleep(POLL)


def _end_abandoned(job: Job) -> None:
    from holdfast.control.supervisor.supervise import stop_without_controller  # noqa: PLC0415 (a stop by a flow needs none of it)

    try:
        stop_without_controller(job)
    except JobAlreadyRunning:  # a flow took it up a moment ago, and has the request before it
        time.sleep(POLL)


def _tell(outlook: JobView, what: str, *, as_json: bool) -> int:
    if as_json:
        say_json(outlook.as_record())
    else:
        say(f"job '{outlook.job.name}' {what}: {outlook.state}, {outlook.reason}")
    return 0
