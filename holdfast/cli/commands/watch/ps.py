"""`holdfast ps`: the jobs that run, or all jobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

from holdfast.accounting.losses import downtimes
from holdfast.cli.job_view import live_jobs, view_jobs
from holdfast.cli.output import clock, echo_json, echo_table, hint
from holdfast.history import queries
from holdfast.history.models import Incident, Job
from holdfast.history.store import History
from holdfast.report.text.wording import count, duration

RUNNING: Final = ("JOB", "STATE", "STEP", "LOSS", "RATE", "ETA", "NODES", "INCIDENTS", "CONTROLLER")
ALL: Final = ("JOB", "STATE", "SUBMITTED", "TOOK", "STEPS", "INCIDENTS", "DOWNTIME", "ID")


def ps(*, everything: bool, limit: int, since: float | None, as_json: bool) -> int:
    """List the jobs that run, or *everything*; only those that were submitted *since* a time."""
    with closing(History.open(create=False)) as history:
        if everything:
            _list_all(history, limit, since or 0.0, as_json=as_json)
        else:
            _list_running(history, since or 0.0, as_json=as_json)
    return 0


def _list_running(history: History, since: float, *, as_json: bool) -> None:
    views = view_jobs(history, [job for job in live_jobs(history) if job.at >= since])
    if as_json:
        echo_json([view.as_record() for view in views])
    elif not views:
        hint("No job runs. `holdfast ps -a` lists those that have ended.")
    else:
        rows = [
            [
                view.job.name,
                view.state,
                view.progress,
                view.loss,
                view.speed,
                duration(view.eta),
                str(len(view.members)),
                str(len(view.incidents)),
                f"pid {view.holder.pid}" if view.holder else "none",
            ]
            for view in views
        ]
        echo_table(RUNNING, rows, coloured=1)


def _list_all(book: History, limit: int, since: float, *, as_json: bool) -> None:
    records = job_records(book, [job for job in queries.jobs(book, limit=limit) if job.at >= since])
    if as_json:
        echo_json(records)
    elif not records:
        hint("The history is empty. `holdfast run JOB_FILE` starts a job, `holdfast demo` shows one.")
    else:
        rows = [
            [
                record["job"],
                record["state"],
                clock(record["submitted"]),
                duration(record["seconds"]),
                count(record["step"]),
                str(record["incidents"]),
                duration(record["downtime_s"]),
                record["id"],
            ]
            for record in records
        ]
        echo_table(ALL, rows, coloured=1)


def job_records(book: History, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return jobs of the history for programs."""
    ids = [job.id for job in jobs]
    states, steps, incidents = queries.states_of(book, ids), queries.last_steps(book, ids), queries.by_job(book, Incident, ids)
    downtime = downtimes(book, [job for job in jobs if incidents[job.id]])
    found = list[dict[str, Any]]()
    for job in jobs:
        state, step = states.get(job.id), steps.get(job.id)
        ended = state.at if state is not None and state.after in queries.TERMINAL else None
        found.append(
            {
                "job": job.name,
                "id": job.id,
                "state": state.after if state else "LAUNCHING",
                "reason": state.reason if state else "",
                "submitted": job.at,
                "seconds": None if ended is None else ended - job.at,
                "step": step.step if step else None,
                "incidents": len(incidents[job.id]),
                "downtime_s": downtime.get(job.id, 0.0),
            }
        )
    return found
