"""A job as its row in the history describes it: what cannot be read names that row."""

from __future__ import annotations

from pydantic import ValidationError

from holdfast import paths
from holdfast.errors import RowCorrupt
from holdfast.history import Job
from holdfast.redaction import shown
from holdfast.spec import Cluster, TrainingJob, cluster_of


def recorded_spec(job: Job) -> TrainingJob:
    """Return what the job is; raise `RowCorrupt` where its row does not say that in words of this version."""
    try:
        return TrainingJob.model_validate(job.spec)
    except ValidationError as error:
        raise _corrupt(job, "spec", error) from error


def recorded_cluster(job: Job) -> Cluster:
    """Return where the job runs; raise `RowCorrupt` where its row does not say that in words of this version."""
    try:
        return cluster_of(job.cluster)
    except ValidationError as error:
        raise _corrupt(job, "cluster", error) from error


def _corrupt(job: Job, column: str, error: ValidationError) -> RowCorrupt:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or column
    why = f"its column '{column}' is none of this version's ({place}: {first['msg']})"
    return RowCorrupt(shown(paths.history_url()), "job", job.id, why)
