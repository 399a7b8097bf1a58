"""Count the ranks of a node where a job file says `auto`, `gpu` or `cpu`, as torchrun's ``--nproc-per-node`` does."""

from __future__ import annotations

import os
from typing import Final

from holdfast import gpu_assignment
from holdfast.errors import BadParameters, Problem
from holdfast.spec.cluster import Cluster, LocalCluster
from holdfast.spec.job import TrainingJob
from holdfast.spec.slurm import SlurmCluster

FIELD: Final = "nproc_per_node"


def counted(job: TrainingJob, cluster: Cluster) -> TrainingJob:
    """Return *job* with a number of ranks on each node of *cluster*; raise `BadParameters` where it cannot be counted."""
    if isinstance(job.nproc_per_node, int):
        return job
    each = _local(job, cluster) if isinstance(cluster, LocalCluster) else _from_file(job, cluster)
    return job.model_copy(update={FIELD: each})


def _local(job: TrainingJob, cluster: LocalCluster) -> int:
    """Return the GPUs or CPUs of each local node: they share those of this machine equally."""
    gpus = () if gpu_assignment.VISIBLE in job.env else gpu_assignment.visible_gpus()
    if job.nproc_per_node == "cpu" or (job.nproc_per_node == "auto" and not gpus):
        return max(1, (os.cpu_count() or 1) // cluster.nodes)
    if not gpus:
        raise _refused("this machine has no GPU", "Write `auto`, `cpu` or a number")
    return max(len(own) for own in gpu_assignment.split(gpus, cluster.nodes))


def _from_file(job: TrainingJob, cluster: Cluster) -> int:
    """Return the GPUs of each node by the cluster file: nothing has connected to the nodes yet."""
    assert not isinstance(cluster, LocalCluster)
    if job.nproc_per_node == "cpu":
        raise _refused(f"the CPUs of the nodes of cluster '{cluster.name}' are not known", "Write a number")
    if isinstance(cluster, SlurmCluster):
        if cluster.gpus is None:
            raise _refused(f"cluster '{cluster.name}' requests no GPUs", "Set `gpus` of the cluster, or write a number")
        return cluster.gpus
    names, known = cluster.labelled(job.node_labels), cluster.gpus_of
    missing = [name for name in names if name not in known]
    if missing:
        raise _refused(
            f"the cluster file does not say how many GPUs {_listed(missing)} has",
            "Set `gpus` of the cluster or of the host, or write a number",
        )
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(known[name], []).append(name)
    if len(found) > 1:
        text = "; ".join(f"{_listed(nodes)}: {count}" for count, nodes in sorted(found.items()))
        raise _refused(f"the nodes have different numbers of GPUs ({text})", "Write a number, or select nodes alike with `node_labels`")
    each = next(iter(found), 0)
    if not each:
        raise _refused(f"the nodes of cluster '{cluster.name}' have no GPU", "Write a number")
    return each


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004 (enough to find the rest)
    return ", ".join(names[:3]) + more


def _refused(reason: str, cure: str) -> BadParameters:
    return BadParameters((Problem(field=FIELD, reason=reason, cure=cure),))
