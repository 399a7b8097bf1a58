"""`holdfast migrate`."""

from __future__ import annotations

import time
from typing import Any, Final

from holdfast.cli.actor import signature
from holdfast.cli.job_view import find_job
from holdfast.cli.output import hint, say, say_json
from holdfast.history import queries
from holdfast.history.lease import holder_of
from holdfast.history.models import Job, Request
from holdfast.history.store import History

POLL: Final = 0.1
NOT_MOVED: Final = 1
"""Exit status when nothing moved, or had not in time."""


def migrate(reference: str, facts: dict[str, Any], *, timeout: float | None, as_json: bool) -> int:
    """Ask for a planned move and wait for what comes of it."""
    history = History.open(create=False)
    try:
        job = find_job(history, reference)
        if queries.has_ended(history, job.id):
            return _tell(job, facts, f"job '{job.name}' has ended", done=False, as_json=as_json)
        if holder_of(history, job.id) is None:
            why = f"no flow steers job '{job.name}' now; the same `holdfast run` adopts it, then ask again"
            return _tell(job, facts, why, done=False, as_json=as_json)
        number = ask(history, job, facts)
        if not as_json:
            hint(f"asked job '{job.name}' to move {describe(facts)}; training goes on meanwhile")
        done, outcome = _outcome(history, job, number, timeout)
        return _tell(job, facts, outcome, done=done, as_json=as_json)
    finally:
        history.close()


def ask(history: History, job: Job, facts: dict[str, Any]) -> str:
    """Ask the flow that steers *job* for a move; return the request's id."""
    row = Request(job_id=job.id, at=time.time(), kind="migrate", by=signature(), facts=facts)
    number = row.id
    with history.session() as session:
        session.add(row)
    return number


def _outcome(history: History, job: Job, number: str, timeout: float | None) -> tuple[bool | None, str]:
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        row = queries.request(history, number)
        if row is not None and row.outcome is not None:
            return row.done, row.outcome
        if queries.has_ended(history, job.id):
            return False, "the job ended before"
        if deadline is not None and time.monotonic() > deadline:
            return None, f"it has not come to an end within {timeout:g} s; `holdfast history {job.name}` shows how far it is"
        time.sleep(POLL)


def describe(facts: dict[str, Any]) -> str:
    """Say what is to move where."""
    what = f"rank {facts['rank']}" if facts.get("rank") is not None else f"the ranks of {facts['from']}"
    return f"{what} to {facts['to']}" if facts.get("to") else what


def _tell(job: Job, facts: dict[str, Any], outcome: str, *, done: bool | None, as_json: bool) -> int:
    if as_json:
        say_json({"job": job.name, "id": job.id, **facts, "moved": done, "outcome": outcome})
    elif done:
        say(outcome)
    else:
        hint(f"{describe(facts)}: not moved, {outcome}" if done is False else outcome)
    return 0 if done else NOT_MOVED
