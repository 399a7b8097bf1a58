"""`nproc_per_node: auto | gpu | cpu` means what it means to torchrun; nodes that differ are named."""

from __future__ import annotations

import os

import pytest

from holdfast.errors import BadParameters
from holdfast.gpu_assignment import VISIBLE
from holdfast.spec import LocalCluster, SlurmCluster, TrainingJob, checks, cluster_of
from holdfast.spec.nproc import counted


def job(nproc: str, **more: object) -> TrainingJob:
    """Return a job with that many ranks on a node."""
    return TrainingJob.model_validate({"name": "a", "command": ["true"], "nproc_per_node": nproc, **more})


@pytest.mark.parametrize(
    ("nproc", "visible", "nodes", "ranks"),
    [("gpu", "0,1,2,3", 1, 4), ("auto", "0,1,2,3", 2, 2), ("auto", "0,1", 1, 2), ("3", "0,1", 1, 3), ("gpu", "5", 4, 1)],
)
def test_local_ranks_are_the_gpus_of_a_node(monkeypatch: pytest.MonkeyPatch, nproc: str, visible: str, nodes: int, ranks: int) -> None:
    """The nodes share those of this machine."""
    monkeypatch.setenv(VISIBLE, visible)
    assert counted(job(nproc), LocalCluster(nodes=nodes)).ranks_per_node == ranks


def test_without_gpus_auto_counts_cpus_and_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun; a job that hides the GPUs has none."""
    cpus = os.cpu_count() or 1
    monkeypatch.setenv(VISIBLE, "")
    assert counted(job("auto"), LocalCluster(nodes=1)).ranks_per_node == counted(job("cpu"), LocalCluster(nodes=1)).ranks_per_node == cpus
    with pytest.raises(BadParameters, match="no GPU"):
        counted(job("gpu"), LocalCluster(nodes=1))
    monkeypatch.setenv(VISIBLE, "0,1")
    assert counted(job("auto", env={VISIBLE: ""}), LocalCluster(nodes=1)).ranks_per_node == cpus
    assert [one.field for one in checks(job("gpu", env={VISIBLE: ""}), LocalCluster(nodes=1))] == ["nproc_per_node"]


def test_on_other_machines_the_cluster_file_says_it() -> None:
    """One number for all; else the nodes are named."""
    alike = cluster_of({"kind": "ssh", "gpus": 8, "hosts": ["a", {"name": "b", "gpus": 8}]})
    assert counted(job("gpu"), alike).ranks_per_node == counted(job("auto"), SlurmCluster(kind="slurm", gpus=8)).ranks_per_node == 8
    other = cluster_of({"kind": "ssh", "gpus": 8, "hosts": ["a", {"name": "b", "gpus": 4}]})
    with pytest.raises(BadParameters, match="b: 4; a: 8"):
        counted(job("auto"), other)
    with pytest.raises(BadParameters, match="how many GPUs a, b has"):
        counted(job("auto"), cluster_of({"kind": "ssh", "hosts": ["a", "b"]}))
    with pytest.raises(BadParameters, match="requests no GPUs"):
        counted(job("gpu"), SlurmCluster(kind="slurm"))
