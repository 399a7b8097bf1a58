"""`holdfast checkpoint prune`: delete old checkpoints of a job."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoints.prune import PrunePlan, delete_checkpoints, plan_prune, remove_remains
from holdfast.cli.commands.checkpoints.inventory import recall_findings
from holdfast.cli.job_view import find_job, live_jobs
from holdfast.cli.output import confirmed, echo, echo_json, echo_table, hint
from holdfast.errors import OperatorError
from holdfast.history import queries
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.policies.states import State
from holdfast.report.text.wording import count, size
from holdfast.runtime.checkpoint.manifest import InvalidatedSteps
from holdfast.runtime.checkpoint_verifier.findings import StoredCheckpoint
from holdfast.stored_job import checkpoint_directory

HEAD: Final = ("STEP", "SIZE", "DECISION", "REASON")


class CheckpointsInUse(OperatorError):
    """A job may be reading the checkpoints."""

    job: str
    state: str
    deleted: int = 0

    def __str__(self) -> str:
        cure = f"Try again when it is {State.RUNNING} (`holdfast status {self.job} --follow` shows it), or has ended"
        return f"{_deleted(self.deleted)}: job '{self.job}' is {self.state} and may be reading them. {cure}."


class RolledBack(OperatorError):
    """States were invalidated after it was decided which checkpoints to delete: those that were to be kept may no longer count."""

    job: str
    deleted: int = 0

    def __str__(self) -> str:
        return (
            f"{_deleted(self.deleted)}: a job with the checkpoints of '{self.job}' was rolled back meanwhile, which invalidates newer "
            "ones. Run the command again: it decides anew."
        )


class ConfirmationRequired(OperatorError):
    """There is no terminal on which to ask for a confirmation."""

    def __str__(self) -> str:
        return "no checkpoint was deleted: there is no terminal to ask on. Give `--yes` to delete without being asked."


def prune(job: str, *, keep: int, yes: bool, as_json: bool) -> int:
    """Delete all but the newest *keep* complete checkpoints of a job, after confirmation."""
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        directory = checkpoint_directory(row)
        _refuse_in_use(history, directory)
        invalidated = _invalidated(history, directory)
        found = plan_prune(directory, keep, invalidated, partial(recall_findings, history))
        if not as_json:
            _show(row, found)
        if found.delete and not yes and not _confirmed(found, as_json=as_json):
            hint("Nothing was deleted.")
            return 0

        def recheck(deleted: int) -> None:
            """Refuse what has become wrong while the question was open, the newest one was read, or others were deleted."""
            _refuse_in_use(history, directory, deleted)
            if _invalidated(history, directory) != invalidated:
                raise RolledBack(row.name, deleted)

        remains = remove_remains(directory)
        gone = delete_checkpoints(found.delete, recheck)
    if as_json:
        echo_json(_record(row, found, gone, remains))
        return 0
    if remains:
        echo(f"Removed what {plural(len(remains), 'interrupted deletion')} had left.")
    if gone:
        echo(f"Deleted {plural(len(gone), 'checkpoint')}, {size(sum(_size(one) for one in gone))}.")
    return 0


def _confirmed(found: PrunePlan, *, as_json: bool) -> bool:
    """Ask whether to delete; raise `ConfirmationRequired` where nobody can answer."""
    answer = confirmed(f"Delete {plural(len(found.delete), 'checkpoint')}, {size(found.freed)}?", as_json=as_json)
    if answer is None:
        raise ConfirmationRequired
    return answer


def _refuse_in_use(history: History, directory: Path, deleted: int = 0) -> None:
    """Raise `CheckpointsInUse` while a job with checkpoints in *directory* starts or recovers: its ranks may be reading any of them."""
    for one in _in_folder(live_jobs(history), directory):
        move = queries.state_of(history, one.id)
        state = move.after if move is not None else State.LAUNCHING
        if state not in {State.RUNNING, State.SUSPENDED}:
            raise CheckpointsInUse(one.name, str(state), deleted)


def _invalidated(history: History, directory: Path) -> InvalidatedSteps:
    """Return the states from which training must not resume, as the newest generation of each job with checkpoints there recorded them."""
    pairs = set[tuple[int, int]]()
    for one in _in_folder(queries.jobs(history, limit=None), directory):
        generation = queries.newest_generation(history, one.id)
        recorded = ((generation.facts or {}).get("invalidated") if generation is not None else None) or ()
        pairs |= {(int(step), int(number)) for step, number in recorded}
    return InvalidatedSteps(tuple(sorted(pairs)))


def _in_folder(jobs: Iterable[Job], directory: Path) -> list[Job]:
    """Return those of *jobs* whose checkpoints are in *directory*."""
    return [one for one in jobs if checkpoint_directory(one).resolve() == directory.resolve()]


def _deleted(number: int) -> str:
    return f"{plural(number, 'checkpoint')} deleted, and no other one" if number else "no checkpoint was deleted"


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


def _record(job: Job, found: PrunePlan, gone: list[StoredCheckpoint], remains: list[Path]) -> dict[str, Any]:
    def records(checkpoints: tuple[StoredCheckpoint, ...] | list[StoredCheckpoint]) -> list[dict[str, Any]]:
        return [{"step": one.step, "path": str(one.path), "size": _size(one)} for one in checkpoints]

    return {
        "job": job.name,
        "id": job.id,
        "directory": str(checkpoint_directory(job)),
        "kept": records(found.keep),
        "deleted": records(gone),
        "left": [{"step": one.step, "path": str(one.path), "reason": why} for one, why in found.left],
        "remains": [str(one) for one in remains],
    }
