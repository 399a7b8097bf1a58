"""`holdfast detach`: detach the controller of a job, which continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from holdfast.cli.arguments import operator
from holdfast.cli.job_view import find_job, view_job
from holdfast.cli.output import echo, echo_json, hint
from holdfast.cli.watch import who_continues
from holdfast.control.supervisor.requests import request_detach
from holdfast.exit_codes import FAILED
from holdfast.history import queries
from holdfast.history.lease import describe_holder, holder_of
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.report.text.wording import duration

POLL_INTERVAL: Final = 0.1
TAKEOVER_SECONDS: Final = 2.0
"""Seconds within which a standby controller, which polls five times a second, has taken a free lease."""


def detach(job: str, *, timeout: float, as_json: bool) -> int:
    """Request that the controller of a job detach from it, and show who controls the job then."""
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        holder = holder_of(history, row.id)
        if queries.has_ended(history, row.id):
            return _show(history, row, f"job '{row.name}' has ended", as_json=as_json)
        if holder is None:
            return _show(history, row, f"job '{row.name}' has no controller. {who_continues(row.name)}", as_json=as_json)

        def detached() -> bool:
            present = holder_of(history, row.id)
            return present is None or present.epoch != holder.epoch

        request_detach(history, holder, by=operator())
        if not _within(timeout, detached):
            where = holder.host.partition("/")[0]
            hint(
                f"{describe_holder(holder)} has not detached from job '{row.name}' within {duration(timeout)}. "
                f"It does so when it can; `kill -KILL {holder.pid}` on {where} ends it at once, and training continues all the same"
            )
            return FAILED
        _within(TAKEOVER_SECONDS, lambda: holder_of(history, row.id) is not None)
        successor = holder_of(history, row.id)
        after = (
            f"{describe_holder(successor)} controls it now" if successor else f"there is no standby controller. {who_continues(row.name)}"
        )
        return _show(history, row, f"the controller detached from job '{row.name}'; {after}", as_json=as_json)


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL)
    return True


def _show(history: History, job: Job, text: str, *, as_json: bool) -> int:
    if as_json:
        echo_json(view_job(history, job).as_record())
    else:
        echo(text)
    return 0
