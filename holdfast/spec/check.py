"""Check whether this machine and the cluster have what a job needs."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.errors import BadParameters, Problem
from holdfast.host import gpu_assignment
from holdfast.plurals import plural
from holdfast.spec import nproc
from holdfast.spec.cluster import Cluster, LocalCluster
from holdfast.spec.job import TrainingJob, is_policy_file
from holdfast.spec.module_check import module_problems
from holdfast.spec.slurm import SlurmCluster

NO_SCRIPTS: Final = frozenset({".toml", ".json", ".ini", ".cfg", ".sh", ".sbatch", ".slurm", ".ipynb", ".txt", ".md"})
"""Suffixes of files that are no Python scripts, and that people name where a script is expected."""


def checks(job: TrainingJob, cluster: Cluster) -> list[Problem]:
    """Return the problems that keep *job* from running on *cluster* now."""
    paths = [*(_local_paths(job) if cluster.kind == "local" else _shared_paths(job)), *_policy(job)]
    try:
        return [*paths, *_capacity(nproc.counted(job, cluster), cluster)]
    except BadParameters as error:
        return [*paths, *error.problems]


def _policy(job: TrainingJob) -> Iterator[Problem]:
    """Yield all problems of the job's policy file."""
    if is_policy_file(job.policy):
        from holdfast.spec.policy import review_policy  # noqa: PLC0415 (it imports the whole catalogue)

        _, problems = review_policy(job.policy)
        for problem in problems:
            yield Problem(field="policy", reason=f"{job.policy}: {problem.field}: {problem.reason}", cure=problem.cure)


def _local_paths(job: TrainingJob) -> Iterator[Problem]:
    directory = job.inside(".")
    if not directory.is_dir():
        yield Problem(field="workdir", reason=f"{directory} is not a directory", cure="Create it, or fix the path")
    elif job.command is not None:
        yield from _program(job, job.command[0], "command")
    elif job.module is not None:
        wrong = [] if job.python is None else list(_program(job, job.python, "python"))
        yield from wrong or module_problems(job)
    else:
        yield from _script(job)
    yield from _checkpoints(job)


def _script(job: TrainingJob) -> Iterator[Problem]:
    path = job.inside(job.script or "")
    if path.is_dir():
        cure = f"Name a script in it, such as `{path.name}/train.py`, or run a package that has a `__main__` by its name, with `module`"
        yield Problem(field="script", reason=f"{path} is a directory", cure=cure)
    elif not path.is_file():
        yield Problem(field="script", reason=f"{path} does not exist", cure=_cure_of_script(job))
    elif path.suffix in NO_SCRIPTS:
        cure = "Name a Python script, or a job file (.yaml); any other program is a `command`, `--no-python` on the command line"
        yield Problem(field="script", reason=f"{path} is no Python script", cure=cure)
    elif not os.access(path, os.R_OK):
        yield Problem(field="script", reason=f"{path} cannot be read", cure="Fix its permissions")
    if job.python is not None:
        yield from _program(job, job.python, "python")


def _cure_of_script(job: TrainingJob) -> str:
    """Return what to do about a script that does not exist; it may be a command line with a script in it."""
    words = (job.script or "").split()
    is_python = Path(words[0]).name.startswith("python") if words else False
    rest = words[1:] if is_python else words
    if is_python and not rest and job.args[:1] and job.inside(job.args[0]).is_file():  # `holdfast run python train.py`
        return f"Leave `{words[0]}` out: the script is {job.args[0]}"
    if rest and len(words) > 1 and job.inside(rest[0]).is_file():
        more = f", and its arguments `args: {json.dumps(rest[1:])}`" if rest[1:] else ""
        return f"Write the script alone, `script: {rest[0]}`{more}"
    return "Fix the path; it is relative to `workdir`"


def _program(job: TrainingJob, program: str, field: str) -> Iterator[Problem]:
    """Yield a problem if *program* cannot be started from the worker's directory with its PATH."""
    if "/" in program:
        path = job.inside(program)
        if not path.is_file():
            yield Problem(field=field, reason=f"{path} does not exist", cure="Fix the path; it is relative to `workdir`")
        elif not os.access(path, os.X_OK):
            yield Problem(
                field=field, reason=f"{path} may not be executed", cure=f"Run `chmod +x {path}`, or start it with its interpreter"
            )
    elif not program or shutil.which(program, path=job.env.get("PATH")) is None:
        yield Problem(field=field, reason=f"'{program}' is not on PATH", cure="Install it, write its full path, or set PATH in `env`")


def _checkpoints(job: TrainingJob) -> Iterator[Problem]:
    folder = job.checkpoints
    reason = why_not_writable(folder)
    if reason and job.checkpoint.directory is None:  # nobody has named this folder: it lies where Holdfast keeps its files
        cure = "Name a folder of your own in HOLDFAST_HOME (default ~/.holdfast), or one for the checkpoints in `checkpoint.directory`"
        yield Problem(field="HOLDFAST_HOME", reason=f"{folder}, the job's checkpoint folder, cannot be written: {reason}", cure=cure)
    elif reason:
        cure = "Create it, free space, fix its permissions, or name another one in `checkpoint.directory`"
        yield Problem(field="checkpoint.directory", reason=f"{folder} cannot be written: {reason}", cure=cure)


def why_not_writable(folder: Path) -> str | None:
    """Return why nothing can be written into *folder* (or be created for it), or None when it can. Leaves no trace."""
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists() or place.is_symlink())
        if not there.is_dir():
            return f"{there} is not a directory"
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def _capacity(job: TrainingJob, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem if the cluster is too small; ranks that are counted on its nodes later need no more than they have."""
    counts = isinstance(job.nproc_per_node, int)
    if cluster.kind == "slurm":  # only Slurm knows its nodes
        yield from _slurm(job, cluster)
        return
    wanted, spare, fit = job.max_nodes, job.spare_nodes, cluster.labelled(job.node_labels)
    if wanted + spare > len(fit):
        spares = f" and {spare} spare" if spare else ""
        labels = ", ".join(f"{name}: {value}" for name, value in job.node_labels.items())
        there = plural(len(fit), "node") + (f" with {labels}" if labels else "")
        reason = f"the job needs {wanted}{spares}, but cluster '{cluster.name}' has {there}"
        yield Problem(field="nnodes", reason=reason, cure="Lower `nnodes` or `spare_nodes`, or give the cluster more nodes")
    else:
        yield from gpu_problems(job, cluster)
    few = {name: count for name, count in cluster.gpus_of.items() if counts and name in fit and 0 < count < job.ranks_per_node}
    for name, count in list(few.items())[:1]:
        others = f", and {plural(len(few) - 1, 'other node has', 'other nodes have')} too few" if len(few) > 1 else ""
        reason = f"the job has {job.ranks_per_node} ranks on each node, but {name} has {plural(count, 'GPU')}{others}"
        yield Problem(field="nproc_per_node", reason=reason, cure="Lower it to the GPUs of a node, or select nodes with `node_labels`")


def short_of_gpus(job: TrainingJob, cluster: Cluster) -> frozenset[str]:
    """Return the nodes of a local cluster that have fewer GPUs of their own than *job* has ranks on a node."""
    if not isinstance(cluster, LocalCluster):
        return frozenset()
    few = gpu_assignment.too_few(gpu_assignment.visible_gpus(), cluster.nodes, job.ranks_per_node, job.env)
    return frozenset(cluster.names[place] for place in few)


def gpu_problems(job: TrainingJob, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem if local nodes have too few GPUs of their own: two ranks on one GPU fail with obscure errors."""
    if not isinstance(cluster, LocalCluster):
        return
    given = gpu_assignment.visible_gpus({gpu_assignment.VISIBLE: job.env.get(gpu_assignment.VISIBLE, "")})
    if given and gpu_assignment.visible_gpus() and job.max_nodes + job.spare_nodes > 1:
        reason = f"{gpu_assignment.VISIBLE} would give all local nodes the same GPUs, {', '.join(given)}, and no two nodes may share one"
        cure = f"Remove it; to exclude some GPUs, start Holdfast with {gpu_assignment.VISIBLE}: it distributes the others"
        yield Problem(field="env", reason=reason, cure=cure)
    gpus, wanted = gpu_assignment.visible_gpus(), job.max_nodes + job.spare_nodes
    if cluster.nodes - len(short_of_gpus(job, cluster)) < wanted:
        each = len(gpu_assignment.split(gpus, cluster.nodes)[0])
        have = plural(min(len(gpus), cluster.nodes), f"node of {cluster.nodes} has", f"nodes of {cluster.nodes} have")
        reason = (
            f"local nodes share no GPU: {have} {each} of the {len(gpus)} here, "
            f"and the job needs {plural(wanted, 'node')}, spares included, with {plural(job.ranks_per_node, 'GPU')} each, one per rank"
        )
        yield Problem(field="nproc_per_node", reason=reason, cure=gpu_assignment.advice(gpus, wanted, job.ranks_per_node))


def _slurm(job: TrainingJob, cluster: SlurmCluster) -> Iterator[Problem]:
    if job.node_labels:
        reason = f"cluster '{cluster.name}' is of kind slurm, and its nodes have no labels"
        yield Problem(
            field="node_labels", reason=reason, cure="Use `constraint` of the cluster, which selects nodes by their features in Slurm"
        )
    if isinstance(job.nproc_per_node, int) and cluster.gpus is not None and cluster.gpus < job.ranks_per_node:
        reason = f"the job has {plural(job.ranks_per_node, 'rank')} on each node, but the cluster requests {plural(cluster.gpus, 'GPU')}"
        yield Problem(field="nproc_per_node", reason=reason, cure="Lower it, or raise `gpus` of the cluster")


def _shared_paths(job: TrainingJob) -> Iterator[Problem]:
    """Yield a problem if nodes on other machines would not share the checkpoints."""
    if job.checkpoint.directory is None:
        cure = "Name a folder that all nodes share, e.g. on NFS or Lustre, at the same path"
        yield Problem(field="checkpoint.directory", reason="the nodes are other machines, and no folder is named", cure=cure)
