"""`nproc_per_node: auto | gpu | cpu` means what it means to torchrun; nodes that differ are named."""

from __future__ import annotations

import os

import pytest

from holdfast.errors import BadParameters
from holdfast.host.gpu_assignment import VISIBLE
from holdfast.spec import LocalCluster, SlurmCluster, TrainingJob, checks, cluster_of
from holdfast.spec.nproc import NodeRanks, counted, ranks_on
from tests.mentions import mentions


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
    cpus = len(os.sched_getaffinity(0))
    monkeypatch.setenv(VISIBLE, "")
    assert counted(job("auto"), LocalCluster(nodes=1)).ranks_per_node == counted(job("cpu"), LocalCluster(nodes=1)).ranks_per_node == cpus
    with pytest.raises(BadParameters, match="no GPU"):
        counted(job("gpu"), LocalCluster(nodes=1))
    monkeypatch.setenv(VISIBLE, "0,1")
    assert counted(job("auto", env={VISIBLE: ""}), LocalCluster(nodes=1)).ranks_per_node == cpus
    assert [one.field for one in checks(job("gpu", env={VISIBLE: ""}), LocalCluster(nodes=1))] == ["nproc_per_node"]


def test_the_gpus_that_a_job_names_itself_are_those_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for torchrun, which starts with them in its environment."""
    monkeypatch.setenv(VISIBLE, "0,1,2,3")
    assert counted(job("gpu", env={VISIBLE: "1,3"}), LocalCluster(nodes=1)).ranks_per_node == 2


@pytest.mark.parametrize("nproc", ["auto", "gpu", "cpu"])
def test_other_machines_are_counted_when_the_job_is_launched_there(nproc: str) -> None:
    """Whatever the cluster file says: a GPU may have fallen off its bus since."""
    alike = cluster_of({"kind": "ssh", "gpus": 8, "hosts": ["a", {"name": "b", "gpus": 8}]})
    for cluster in (alike, cluster_of({"kind": "ssh", "hosts": ["a", "b"]}), SlurmCluster(kind="slurm")):
        assert counted(job(nproc), cluster).nproc_per_node == nproc


def test_a_cluster_file_with_different_nodes_is_refused_before_anything_starts() -> None:
    """The nodes are named, each with its number."""
    other = cluster_of({"kind": "ssh", "gpus": 8, "hosts": ["a", {"name": "b", "gpus": 4}]})
    for nproc in ("auto", "gpu"):
        (problem,) = [one for one in checks(job(nproc, checkpoint={"directory": "/shared"}), other) if one.field == "nproc_per_node"]
        assert mentions(problem.reason, "b: 4 GPUs", "a: 8 GPUs")
    none = cluster_of({"kind": "ssh", "gpus": 0, "hosts": ["a", "b"]})
    with pytest.raises(BadParameters, match="a, b has no GPU"):
        counted(job("gpu"), none)
    assert counted(job("auto"), none).nproc_per_node == "auto"


@pytest.mark.parametrize(
    ("nproc", "gpus", "ranks"), [("auto", 4, (4, "GPU")), ("auto", 0, (2, "CPU")), ("gpu", 4, (4, "GPU")), ("cpu", 4, (2, "CPU"))]
)
def test_a_node_has_as_many_ranks_as_torchrun_would_start(nproc: str, gpus: int, ranks: tuple[int, str]) -> None:
    """torch.distributed.run.determine_local_world_size; here on a node with two CPUs."""
    assert ranks_on(nproc, gpus=gpus, cpus=2) == NodeRanks(*ranks)
    assert ranks_on("gpu", gpus=0, cpus=2) is None
