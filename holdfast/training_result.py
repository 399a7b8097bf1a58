"""The outcome of a training job, as a value for a user's own flow."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from holdfast.errors import OperatorError
from holdfast.history import History, Job, queries
from holdfast.stored_job import checkpoint_directory


class TrainingResult(BaseModel):
    """One run of a training job."""

    model_config = ConfigDict(frozen=True)

    job: str
    """Its name."""
    job_id: str
    """Its id in the history: the same name may run again."""
    state: str
    """`COMPLETED`, `FAILED` or `CANCELLED`; another state while it runs."""
    message: str
    """Why it is in that state."""
    last_step: int | None
    """The newest step; empty when the script reported none, or the history could not be read."""
    last_loss: float | None
    checkpoint_directory: Path
    """It contains a folder for each checkpoint; see `latest_checkpoint`."""
    incidents: int
    """How many faults interrupted it."""

    @classmethod
    def of(cls, row: Job, state: str = "", message: str = "") -> Self:
        """Return what the history knows of a job; *state* and *message* replace the recorded ones.

        Without a readable history only the numbers are missing: the job has ended all the same.
        """
        found = cls(
            job=row.name,
            job_id=row.id,
            state="UNKNOWN",
            message="",
            last_step=None,
            last_loss=None,
            checkpoint_directory=checkpoint_directory(row),
            incidents=0,
        )
        with suppress(OperatorError), closing(History.open(create=False)) as history:
            found = cls.read(history, row)
        return found.model_copy(update={name: text for name, text in (("state", state), ("message", message)) if text})

    @classmethod
    def read(cls, history: History, row: Job) -> Self:
        """Return what *history* knows of a job."""
        move, step = queries.state_of(history, row.id), queries.last_step(history, row.id)
        return cls(
            job=row.name,
            job_id=row.id,
            state=move.after if move is not None else "LAUNCHING",
            message=move.reason if move is not None else "submitted",
            last_step=step.step if step is not None else None,
            last_loss=step.loss if step is not None else None,
            checkpoint_directory=checkpoint_directory(row),
            incidents=len(queries.incidents(history, row.id)),
        )


def training_result(job: str) -> TrainingResult:
    """Return the outcome or the present state of the newest job called *job*; raise `UnknownJob` when the history has none of that name.

    For what `training_job` cannot return: for a job that failed or was cancelled, Prefect raises an exception in the calling flow.
    """
    with closing(History.open(create=False)) as history:
        return TrainingResult.read(history, queries.newest_job(history, job))
