"""`holdfast node migrate`: move ranks to another node while training runs."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any, Final

import click

from holdfast.cli.arguments import operator
from holdfast.cli.job_view import find_job
from holdfast.cli.output import echo, echo_json, hint
from holdfast.exit_codes import FAILED
from holdfast.history import queries
from holdfast.history.lease import holder_of
from holdfast.history.models import Job, Request
from holdfast.history.store import History
from holdfast.report.text.wording import duration

POLL_INTERVAL: Final = 0.1


def migrate(  # noqa: PLR0913 (as many as the command has options)
    job: str, *, source: str | None, ranks: tuple[int, ...], target: str | None, timeout: float | None, as_json: bool
) -> int:
    """Request live migrations, one after another, and wait for their outcomes."""
    if (source is None) == (not ranks):
        raise click.UsageError("name what to migrate: either --from NODE or --rank RANKS")
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        moves = list[dict[str, Any]]()
        for rank in ranks or (None,):
            facts = {"from": source, "to": target, "rank": rank}
            done, outcome = _migrate(history, row, facts, timeout, as_json=as_json)
            moves.append({**facts, "moved": done, "outcome": outcome})
            if not as_json and done:
                echo(outcome)
            elif not as_json:
                hint(f"{describe(facts)}: not moved, {outcome}" if done is False else outcome)
    if as_json:
        echo_json({"job": row.name, "id": row.id, "migrations": moves})
    return 0 if all(one["moved"] for one in moves) else FAILED


def _migrate(history: History, job: Job, facts: dict[str, Any], timeout: float | None, *, as_json: bool) -> tuple[bool | None, str]:
    """Migrate what *facts* name; return whether it was done (None: not in time) and the outcome."""
    if queries.has_ended(history, job.id):
        return False, f"job '{job.name}' has ended"
    if holder_of(history, job.id) is None:
        return False, f"job '{job.name}' has no controller; run the same `holdfast run` to reattach, then try again"
    request = request_migration(history, job, facts)
    if not as_json:
        hint(f"requested to migrate {describe(facts)} of job '{job.name}'; training continues meanwhile")
    return _wait(history, job, request, timeout)


def request_migration(history: History, job: Job, facts: dict[str, Any]) -> str:
    """Request a live migration from the controller of *job*; return the request's id."""
    row = Request(job_id=job.id, at=time.time(), kind="migrate", by=operator(), facts=facts)
    number = row.id
    with history.session() as session:
        session.add(row)
    return number


def _wait(history: History, job: Job, request: str, timeout: float | None) -> tuple[bool | None, str]:
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        row = queries.request(history, request)
        if row is not None and row.outcome is not None:
            return row.done, row.outcome
        if queries.has_ended(history, job.id):
            return False, "the job ended first"
        if deadline is not None and time.monotonic() > deadline:
            late = f"the migration has not finished within {duration(timeout)}"
            return None, f"{late}; `holdfast status {job.name} --events` shows its progress"
        time.sleep(POLL_INTERVAL)


def describe(facts: dict[str, Any]) -> str:
    """Return what is to move where."""
    what = f"rank {facts['rank']}" if facts.get("rank") is not None else f"the ranks of {facts['from']}"
    return f"{what} to {facts['to']}" if facts.get("to") else what
