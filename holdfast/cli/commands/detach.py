"""`holdfast detach`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.cli.actor import signature
from holdfast.cli.job_view import find_job, look
from holdfast.cli.output import hint, say, say_json
from holdfast.cli.watch import whose_it_is
from holdfast.control.supervisor.requests import request_detach
from holdfast.history import queries
from holdfast.history.lease import describe_holder, holder_of
from holdfast.history.models import Job, Lease
from holdfast.history.store import History

POLL: Final = 0.1
HEIR: Final = 2.0
"""Seconds in which a standby, which looks five times a second, has taken what is free."""
TOO_LONG: Final = 1
"""Exit status when the flow had not let go in time."""


def detach(reference: str, *, timeout: float, as_json: bool) -> int:
    """Have the flow of a job let go of it, and tell who steers it then."""
    history = History.open(create=False)
    try:
        job = find_job(history, reference)
        steers = holder_of(history, job.id)
        if queries.has_ended(history, job.id):
            return _tell(history, job, f"job '{job.name}' has ended", as_json=as_json)
        if steers is None:
            return _tell(history, job, f"no flow steers job '{job.name}'. {whose_it_is(job.name)}", as_json=as_json)
        request_detach(history, steers, by=signature())
        if not _within(timeout, lambda: not _steers(history, steers)):
            where = steers.host.partition("/")[0]
            hint(
                f"{describe_holder(steers)} has not let go of job '{job.name}' within {timeout:g} s. "
                f"It does so when it can; `kill -KILL {steers.pid}` on {where} ends it at once, and the job trains on all the same"
            )
            return TOO_LONG
        return _tell(history, job, _heir(history, job), as_json=as_json)
    finally:
        history.close()


def _steers(history: History, lease: Lease) -> bool:
    present = holder_of(history, lease.job_id)
    return present is not None and present.epoch == lease.epoch


def _heir(history: History, job: Job) -> str:
    """Say who steers the job from now on."""
    _within(HEIR, lambda: holder_of(history, job.id) is not None)
    heir = holder_of(history, job.id)
    if heir is None:
        return (
            f"the flow has let go of job '{job.name}', and no standby was there. It trains on: its agents keep it until the same "
            f"`holdfast run` adopts it; `holdfast stop {job.name}` ends it"
        )
    return f"the flow has let go of job '{job.name}'; {describe_holder(heir)} steers it now"


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def _tell(history: History, job: Job, words: str, *, as_json: bool) -> int:
    if as_json:
        say_json(look(history, job).as_record())
    else:
        say(words)
    return 0
