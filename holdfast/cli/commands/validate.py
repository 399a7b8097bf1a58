"""`holdfast validate`: check a job file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from holdfast.cli.output import echo, echo_json
from holdfast.errors import BadFile
from holdfast.report.wording import plural
from holdfast.spec import Cluster, LocalCluster, TrainingJob, review
from holdfast.spec.load import allocation
from holdfast.spec.problems import shown


def validate(job_file: Path, cluster_file: Path | None, *, as_json: bool) -> int:
    """Show what a job file describes, or all its problems."""
    if as_json:
        draft = review(job_file, cluster_file)
        problems = [dataclasses.asdict(problem) for problem in draft.problems]
        fields = None if problems or draft.job is None else draft.job.model_dump(mode="json")
        echo_json({"file": str(job_file), "ok": not problems, "problems": problems, "job": fields})
        return 2 if problems else 0
    job, cluster = checked(job_file, cluster_file)
    echo(f"{job_file}: valid. {summary(job, cluster)}")
    return 0


def checked(job_file: Path, cluster_file: Path | None) -> tuple[TrainingJob, Cluster]:
    """Return job and cluster if they have no problems; raise `BadFile` with all of them."""
    draft = review(job_file, cluster_file)
    if draft.problems or draft.job is None:
        raise BadFile(shown(str(job_file)), tuple(draft.problems))
    return draft.job, draft.cluster or LocalCluster()


def summary(job: TrainingJob, cluster: Cluster) -> str:
    """Return in a sentence what is to run."""
    spare = f" and {job.spare_nodes} spare" if job.spare_nodes else ""
    least = f", at least {job.min_nodes}" if job.min_nodes < job.max_nodes else ""
    what = job.script or (f"python -m {job.module}" if job.module else (job.command or [""])[0])
    where = f"{plural(job.max_nodes, 'node')}{spare} of cluster '{cluster.name}'{least}"
    number, allocated = allocation(), ""
    ranks = f"{plural(job.nproc_per_node, 'rank')} each" if isinstance(job.nproc_per_node, int) else f"ranks by `{job.nproc_per_node}`"
    if number and cluster.kind == "local":
        allocated = f" This runs within Slurm job {number}, and uses only this host of it, as the files say."
    elif number and cluster.kind == "slurm" and cluster.allocation == "auto":
        allocated = f" Its nodes are those of Slurm job {number}, within which this runs."
    return f"Job '{job.name}': {what} on {where}, {ranks}.{allocated}"
