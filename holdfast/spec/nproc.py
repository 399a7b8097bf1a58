"""Count the ranks of a node where a job file says `auto`, `gpu` or `cpu`, as torchrun's ``--nproc-per-node`` does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from holdfast.errors import BadParameters, Problem
from holdfast.host import gpu_assignment
from holdfast.spec.cluster import Cluster, LocalCluster, SshCluster
from holdfast.spec.job import TrainingJob

FIELD: Final = "nproc_per_node"


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks of one node: one for each of its GPUs, or for each of its CPUs."""

    number: int
    per: str
    """``GPU`` or ``CPU``."""

    def __str__(self) -> str:
        return f"{self.number} {self.per}{'' if self.number == 1 else 's'}"


def ranks_on(nproc: object, *, gpus: int, cpus: int) -> NodeRanks | None:
    """Return the ranks of a node with that many GPUs and CPUs; None for `gpu` where it has no GPU."""
    if nproc == "cpu" or (nproc == "auto" and not gpus):
        return NodeRanks(max(1, cpus), "CPU")
    return NodeRanks(gpus, "GPU") if gpus else None


def counted(job: TrainingJob, cluster: Cluster) -> TrainingJob:
    """Return *job* with a number of ranks on each local node; nodes on other machines are counted when the job is launched there.

    Raise `BadParameters` where it is known by now that the nodes cannot be counted.
    """
    if isinstance(job.nproc_per_node, int):
        return job
    if isinstance(cluster, LocalCluster):
        return job.model_copy(update={FIELD: _local(job, cluster)})
    if isinstance(cluster, SshCluster) and job.nproc_per_node != "cpu":
        _check_file(job, cluster)
    return job


def _local(job: TrainingJob, cluster: LocalCluster) -> int:
    """Return the GPUs or CPUs of each local node: they share those of this machine equally."""
    gpus = gpu_assignment.visible_gpus()
    each = max((len(own) for own in gpu_assignment.split(gpus, cluster.nodes)), default=0) if gpus else 0
    if gpu_assignment.VISIBLE in job.env:  # every local node gets these
        each = len(gpu_assignment.visible_gpus(job.env))
    ranks = ranks_on(job.nproc_per_node, gpus=each, cpus=len(os.sched_getaffinity(0)) // cluster.nodes)
    if ranks is None:
        raise BadParameters((Problem(field=FIELD, reason="this machine has no GPU", cure="Write `auto`, `cpu` or a number"),))
    return ranks.number


def _check_file(job: TrainingJob, cluster: SshCluster) -> None:
    """Raise `BadParameters` if the nodes have different numbers of GPUs by the cluster file, or none where the job asks for some."""
    found: dict[int, list[str]] = {}
    for name in cluster.labelled(job.node_labels):
        if name in cluster.gpus_of:
            found.setdefault(cluster.gpus_of[name], []).append(name)
    if len(found) > 1:
        listed = "; ".join(f"{_listed(nodes)}: {NodeRanks(count, 'GPU')}" for count, nodes in sorted(found.items()))
        raise BadParameters((problem_of(listed),))
    if found.keys() == {0} and job.nproc_per_node == "gpu":
        raise BadParameters((problem_of(f"{_listed(found[0])} has no GPU"),))


def problem_of(listed: str) -> Problem:
    """Return what is wrong with nodes that cannot be counted; *listed* names them, with their numbers."""
    cure = "Write a number, or select nodes alike with `node_labels` (on Slurm with `constraint` of the cluster)"
    return Problem(field=FIELD, reason=f"the nodes do not have the same number of GPUs or CPUs ({listed})", cure=cure)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004 (enough to find the rest)
    return ", ".join(names[:3]) + more
