"""What became of a training job, as a value for a user's own flow."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.errors import OperatorError
from holdfast.history import History, Job, queries
from holdfast.paths import job_directory
from holdfast.spec import TrainingJob


class TrainingResult(BaseModel):
    """One run of a training job."""

    model_config = ConfigDict(frozen=True)

    job: str
    """Its name."""
    job_id: str
    """Its id in the history: the same name may run again."""
    state: str
    """`COMPLETED`, `FAILED` or `CANCELLED`; another word while it runs."""
    message: str
    """Why it is in that state."""
    last_step: int | None
    """The newest step; empty when the script reported none, or the history could not be read."""
    last_loss: float | None
    checkpoint_directory: Path
    """Below it lies one folder for each checkpoint; see `latest_checkpoint`."""
    incidents: int
    """How many faults interrupted it."""

    @classmethod
    def of(cls, row: Job, state: str = "", message: str = "") -> Self:
        """Return what the history knows of a job; *state* and *message* go before what it says of these.

        A history that cannot be read costs the figures and nothing else: the job has ended all the same.
        """
        found: Self | None = None
        with suppress(OperatorError), closing(History.open(create=False)) as history:
            found = cls._read(history, row)
        if found is None:
            found = cls._bare(row)
        return found.model_copy(update={name: text for name, text in (("state", state), ("message", message)) if text})

    @classmethod
    def _bare(cls, row: Job) -> Self:
        return cls(
            job=row.name,
            job_id=row.id,
            state="UNKNOWN",
            message="",
            last_step=None,
            last_loss=None,
            checkpoint_directory=checkpoints_of(row),
            incidents=0,
        )

    @classmethod
    def _read(cls, history: History, row: Job) -> Self:
        move, step = queries.state_of(history, row.id), queries.last_step(history, row.id)
        return cls(
            job=row.name,
            job_id=row.id,
            state=move.after if move is not None else "LAUNCHING",
            message=move.reason if move is not None else "submitted",
            last_step=step.step if step is not None else None,
            last_loss=step.loss if step is not None else None,
            checkpoint_directory=checkpoints_of(row),
            incidents=len(queries.incidents(history, row.id)),
        )


def training_result(job: str) -> TrainingResult:
    """Return what became of the newest job called *job*, or how it stands; raise `UnknownJob` when the history has none of that name.

    For what `training_job` cannot return: of a job that failed or was cancelled Prefect gives the calling flow an exception.
    """
    with closing(History.open(create=False)) as history:
        return TrainingResult._read(history, queries.newest_job(history, job))  # noqa: SLF001 (this module's own)


def checkpoints_of(row: Job) -> Path:
    """Return the folder of a job's checkpoints."""
    try:
        return TrainingJob.model_validate(row.spec).checkpoints
    except ValidationError:  # written by another version
        return job_directory(row.name) / "checkpoints"
