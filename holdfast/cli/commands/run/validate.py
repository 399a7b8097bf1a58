"""`holdfast validate`: check a job, cluster or policy file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic import BaseModel

from holdfast.cli.commands.run.launch_options import warn_of_joined_arguments
from holdfast.cli.output import echo, echo_json
from holdfast.errors import BadFile, Problem
from holdfast.exit_codes import OPERATOR_ERROR
from holdfast.plurals import plural
from holdfast.spec import Cluster, LocalCluster, TrainingJob, review
from holdfast.spec.files.load import FileKind, allocation, kind_of_file, review_cluster
from holdfast.spec.files.problems import shown
from holdfast.spec.policy import review_policy


def validate(file: Path, cluster_file: Path | None, *, default_cluster: Path | None, as_json: bool) -> int:
    """Show what a file describes, or all its problems."""
    kind = kind_of_file(file)
    found, problems, text = _reviewed(kind, file, cluster_file, default_cluster)
    if as_json:
        content = None if problems or found is None else found.model_dump(mode="json")
        listed = [dataclasses.asdict(one) for one in problems]
        echo_json({"file": str(file), "kind": kind, "ok": not problems, "problems": listed, kind: content})
        return OPERATOR_ERROR if problems else 0
    if isinstance(found, TrainingJob):
        warn_of_joined_arguments(found)
    if problems or found is None:
        raise BadFile(shown(str(file)), tuple(problems))
    echo(f"{file}: valid. {text}")
    return 0


def _reviewed(
    kind: FileKind, file: Path, cluster_file: Path | None, default_cluster: Path | None
) -> tuple[BaseModel | None, list[Problem], str]:
    """Return what *file* describes as far as it is valid, its problems, and a sentence about it."""
    if kind == "policy":
        policy, problems = review_policy(file)
        return policy, problems, f"A policy, based on {policy.based_on}." if policy else ""
    if kind == "cluster":
        draft = review_cluster(file)
        return draft.cluster, draft.problems, f"Cluster '{draft.cluster.name}' of kind {draft.cluster.kind}." if draft.cluster else ""
    draft = review(file, cluster_file, default_cluster)
    return draft.job, draft.problems, summary(draft.job, draft.cluster or LocalCluster()) if draft.job else ""


def summary(job: TrainingJob, cluster: Cluster) -> str:
    """Return in a sentence what is to run."""
    spare = f" and {job.spare_nodes} spare" if job.spare_nodes else ""
    least = f", at least {job.min_nodes}" if job.min_nodes < job.max_nodes else ""
    what = job.script or (f"python -m {job.module}" if job.module else (job.command or [""])[0])
    place = "(this machine)" if cluster.kind == "local" else f"of cluster '{cluster.name}'"
    where = f"{plural(job.max_nodes, 'node')}{spare} {place}{least}"
    number, allocated = allocation(), ""
    ranks = f"{plural(job.nproc_per_node, 'rank')} each" if isinstance(job.nproc_per_node, int) else f"ranks by `{job.nproc_per_node}`"
    if number and cluster.kind == "local":
        allocated = f" This runs within Slurm job {number}, and uses only this host of it, as the files say."
    elif number and cluster.kind == "slurm" and cluster.allocation == "auto":
        allocated = f" Its nodes are those of Slurm job {number}, within which this runs."
    return f"Job '{job.name}': {what} on {where}, {ranks}.{allocated}"
