"""`holdfast validate`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from holdfast.cli.output import say, say_json
from holdfast.errors import BadFile
from holdfast.report.wording import plural
from holdfast.spec import Cluster, LocalCluster, TrainingJob, review
from holdfast.spec.load import allocation
from holdfast.spec.problems import shown


def validate(job_file: Path, cluster_file: Path | None, *, as_json: bool) -> int:
    """Tell what a job file says, or all that is wrong with it."""
    draft = review(job_file, cluster_file)
    if as_json:
        problems = [dataclasses.asdict(problem) for problem in draft.problems]
        fields = None if problems or draft.job is None else draft.job.model_dump(mode="json")
        say_json({"file": str(job_file), "ok": not problems, "problems": problems, "job": fields})
        return 2 if problems else 0
    job, cluster = checked(job_file, cluster_file)
    say(f"{job_file}: fine. {describe(job, cluster)}")
    return 0


def checked(job_file: Path, cluster_file: Path | None) -> tuple[TrainingJob, Cluster]:
    """Return job and cluster when nothing is wrong with them; raise `BadFile` with all that is."""
    draft = review(job_file, cluster_file)
    if draft.problems or draft.job is None:
        raise BadFile(shown(str(job_file)), tuple(draft.problems))
    return draft.job, draft.cluster or LocalCluster()


def describe(job: TrainingJob, cluster: Cluster) -> str:
    """Say in a sentence what is to run."""
    nodes = job.nodes
    spare = f" and {nodes.spare} spare" if nodes.spare else ""
    least = f", at least {nodes.min_nodes}" if nodes.min_nodes < nodes.wanted else ""
    what = job.script or (job.command or [""])[0]
    where = f"{plural(nodes.wanted, 'node')}{spare} of cluster '{cluster.name}'{least}"
    return f"Job '{job.name}': {what} on {where}, {plural(nodes.ranks, 'rank')} each.{_in_slurm(cluster)}"


def _in_slurm(cluster: Cluster) -> str:
    """Say what becomes of the Slurm allocation that this is run inside of, if it is."""
    number = allocation()
    if not number or cluster.kind == "ssh":
        return ""
    if cluster.kind == "local":
        return f" This is inside of Slurm job {number}, and uses this host alone of it, as the files say."
    return f" Its nodes are those of Slurm job {number}, which this is inside of." if cluster.allocation == "auto" else ""
