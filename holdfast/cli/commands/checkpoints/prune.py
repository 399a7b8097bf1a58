"""`holdfast checkpoint prune`: delete old checkpoints of a job."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any, Final

import click

from holdfast.checkpoints.prune import PrunePlan, delete_checkpoints, plan_prune
from holdfast.cli.job_view import find_job, live_jobs
from holdfast.cli.output import echo, echo_json, echo_table, hint
from holdfast.errors import OperatorError
from holdfast.history import queries
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.report.wording import count, plural, size
from holdfast.runtime.checkpoint.manifest import InvalidatedSteps
from holdfast.runtime.checkpoint_verifier.findings import StoredCheckpoint
from holdfast.stored_job import checkpoint_directory
from policies.states import State

HEAD: Final = ("STEP", "SIZE", "DECISION", "REASON")


class CheckpointsInUse(OperatorError):
    """A job may be reading the checkpoints."""

    job: str
    state: str

    def __str__(self) -> str:
        cure = f"Try again when it is {State.RUNNING} (`holdfast status {self.job} --follow` shows it), or has ended"
        return f"no checkpoint was deleted: job '{self.job}' is {self.state} and may be reading them. {cure}."


class ConfirmationRequired(OperatorError):
    """There is no terminal on which to ask for a confirmation."""

    def __str__(self) -> str:
        return "no checkpoint was deleted: there is no terminal to ask on. Give `--yes` to delete without being asked."


def prune(job: str, *, keep: int, yes: bool, as_json: bool) -> int:
    """Delete all but the newest *keep* complete checkpoints of a job, after confirmation."""
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        directory = checkpoint_directory(row)
        _refuse_in_use(history, row)
        found = plan_prune(directory, keep, _invalidated(history, row))
        if not as_json:
            _show(row, found)
        if found.delete and not yes:
            if as_json or not sys.stdin.isatty():
                raise ConfirmationRequired
            if not click.confirm(f"Delete {plural(len(found.delete), 'checkpoint')}?", default=False):
                hint("Nothing was deleted.")
                return 0
            _refuse_in_use(history, row)  # the job may have failed while the question was open
        gone = delete_checkpoints(found.delete)
    if as_json:
        echo_json(_record(row, found, gone))
    elif gone:
        echo(f"Deleted {plural(len(gone), 'checkpoint')}, {size(sum(_size(one) for one in gone))}.")
    return 0


def _refuse_in_use(history: History, job: Job) -> None:
    """Raise `CheckpointsInUse` while a job with these checkpoints starts or recovers: its ranks may be reading any of them."""
    directory = checkpoint_directory(job).resolve()
    for one in live_jobs(history):
        if checkpoint_directory(one).resolve() == directory:
            move = queries.state_of(history, one.id)
            state = move.after if move is not None else State.LAUNCHING
            if state not in {State.RUNNING, State.SUSPENDED}:
                raise CheckpointsInUse(one.name, str(state))


def _invalidated(history: History, job: Job) -> InvalidatedSteps:
    """Return the states from which the job must not resume, as the newest generation of the newest run recorded them."""
    generation = queries.newest_generation(history, job.id)
    pairs = ((generation.facts or {}).get("invalidated") if generation is not None else None) or ()
    return InvalidatedSteps(tuple((int(step), int(number)) for step, number in pairs))


def _size(one: StoredCheckpoint) -> int:
    return one.manifest.size if one.manifest is not None else 0


def _show(job: Job, found: PrunePlan) -> None:
    rows = [(one, "keep", "") for one in found.keep]
    rows += [(one, "delete", "older") for one in found.delete]
    rows += [(one, "leave", why) for one, why in found.left]
    if not rows:
        echo(f"Job '{job.name}' has no checkpoint.")
        return
    rows.sort(key=lambda row: -row[0].step)
    echo_table(HEAD, [(count(one.step), size(_size(one)), decision, why) for one, decision, why in rows], last="wrapped")
    if not found.delete:
        echo(f"There is nothing to delete: {plural(len(found.keep), 'complete checkpoint')} can be resumed from.")


def _record(job: Job, found: PrunePlan, gone: list[StoredCheckpoint]) -> dict[str, Any]:
    def records(checkpoints: tuple[StoredCheckpoint, ...] | list[StoredCheckpoint]) -> list[dict[str, Any]]:
        return [{"step": one.step, "path": str(one.path), "size": _size(one)} for one in checkpoints]

    return {
        "job": job.name,
        "id": job.id,
        "directory": str(checkpoint_directory(job)),
        "kept": records(found.keep),
        "deleted": records(gone),
        "left": [{"step": one.step, "path": str(one.path), "reason": why} for one, why in found.left],
    }
