"""Read the description of a job from its row in the history; errors name that row."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ValidationError

from holdfast import paths
from holdfast.errors import RowCorrupt
from holdfast.history import Job
from holdfast.security.redaction import shown
from holdfast.spec import Cluster, TrainingJob, cluster_of
from holdfast.spec.job import CheckpointPlan


class _RecordedPlan(BaseModel):
    directory: str | None = None


class _RecordedFolders(BaseModel):
    """The fields of a job from which the folder of its checkpoints follows: they are read also where another version wrote the others."""

    workdir: str = "."
    checkpoint: _RecordedPlan = _RecordedPlan()


def recorded_spec(job: Job) -> TrainingJob:
    """Return what the job runs; raise `RowCorrupt` where this version cannot read its row."""
    try:
        return TrainingJob.model_validate(job.spec)
    except ValidationError as error:
        raise _corrupt(job, "spec", error) from error


def recorded_cluster(job: Job) -> Cluster:
    """Return where the job runs; raise `RowCorrupt` where this version cannot read its row."""
    try:
        return cluster_of(job.cluster)
    except ValidationError as error:
        raise _corrupt(job, "cluster", error) from error


def checkpoint_directory(job: Job) -> Path:
    """Return the folder of the job's checkpoints; raise `RowCorrupt` where its row does not say which that is."""
    try:
        found = _RecordedFolders.model_validate(job.spec)
    except ValidationError as error:
        raise _corrupt(job, "spec", error) from error
    plan = CheckpointPlan.model_construct(directory=found.checkpoint.directory)
    return TrainingJob.model_construct(name=job.name, workdir=found.workdir, checkpoint=plan).checkpoints


def _corrupt(job: Job, column: str, error: ValidationError) -> RowCorrupt:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or column
    why = f"its column '{column}' was not written by this version ({field}: {first['msg']})"
    return RowCorrupt(shown(paths.history_url()), "job", job.id, why)
