"""Read the description of a job from its row in the history; errors name that row."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from holdfast import paths
from holdfast.errors import RowCorrupt
from holdfast.history import Job
from holdfast.redaction import shown
from holdfast.spec import Cluster, TrainingJob, cluster_of


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
    """Return the folder of the job's checkpoints; the default one where this version cannot read its row."""
    try:
        return TrainingJob.model_validate(job.spec).checkpoints
    except ValidationError:
        return paths.job_directory(job.name) / "checkpoints"


def _corrupt(job: Job, column: str, error: ValidationError) -> RowCorrupt:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or column
    why = f"its column '{column}' was not written by this version ({field}: {first['msg']})"
    return RowCorrupt(shown(paths.history_url()), "job", job.id, why)
