"""Local nodes and the GPUs of this machine: each node has its own, and what needs more is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.host import gpu_assignment
from holdfast.host.gpu_assignment import VISIBLE
from holdfast.spec import LocalCluster, TrainingJob
from holdfast.spec.check import checks, short_of_gpus
from tests.mentions import mentions
from tests.waiting import wait_until

EIGHT = tuple("01234567")


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        ("0,1,2", ("0", "1", "2")),
        (" 3 , 1 ", ("3", "1")),
        ("GPU-8932f937,MIG-GPU-1/1/0", ("GPU-8932f937", "MIG-GPU-1/1/0")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),  # CUDA reads no further
        ("0,,1", ("0",)),
        ("NoDevFiles", ()),
    ],
)
def test_what_the_environment_leaves_a_process_is_what_it_may_share_out(tmp_path: Path, said: str, gpus: tuple[str, ...]) -> None:
    """As CUDA reads it, whatever the machine has."""
    (tmp_path / "nvidia0").touch()
    assert gpu_assignment.visible_gpus({VISIBLE: said}, tmp_path) == gpus


def test_without_a_variable_all_gpus_are_visible(tmp_path: Path) -> None:
    """By its devices; what else NVIDIA's driver puts there is no GPU."""
    assert gpu_assignment.visible_gpus({}, tmp_path) == ()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert gpu_assignment.visible_gpus({}, tmp_path) == ("0", "1", "2")


def test_the_gpus_of_a_process_are_read_from_its_environment() -> None:
    """A real one; one that has ended has none."""
    nap = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    child = subprocess.Popen(nap, env={VISIBLE: "2,3"}, stdin=subprocess.PIPE)
    try:
        wait_until(lambda: gpu_assignment.gpus_of(child.pid) == ("2", "3"), seconds=60)  # once it has begun
    finally:
        child.communicate()
    assert gpu_assignment.gpus_of(child.pid) == ()


@pytest.mark.parametrize(
    ("gpus", "nodes", "each"),
    [
        (EIGHT, 2, ["0123", "4567"]),
        (EIGHT, 3, ["01", "23", "45"]),
        (EIGHT, 1, ["01234567"]),
        (EIGHT[:2], 4, ["0", "1", "", ""]),
        ((), 2, ["", ""]),
    ],
)
def test_nodes_get_equal_shares(gpus: tuple[str, ...], nodes: int, each: list[str]) -> None:
    """In order; with fewer GPUs than nodes the first ones get them."""
    assert [tuple(one) for one in each] == gpu_assignment.split(gpus, nodes)


@given(st.integers(0, 20), st.integers(1, 12))
def test_no_gpu_is_anybody_elses_too(count: int, nodes: int) -> None:
    """Whatever there is of either."""
    found = gpu_assignment.split([str(number) for number in range(count)], nodes)
    assert len(found) == nodes
    given_away = [gpu for one in found for gpu in one]
    assert len(set(given_away)) == len(given_away) >= min(count, nodes)
    assert len({len(one) for one in found if one}) <= 1


def job(tmp_path: Path, wanted: int, ranks: int, *, spare: int = 0, visible: str | None = None) -> TrainingJob:
    """Return a job."""
    (tmp_path / "train.py").touch()
    nodes = {"nnodes": wanted, "nproc_per_node": ranks, "spare_nodes": spare}
    environment = {} if visible is None else {VISIBLE: visible}
    fields: dict[str, Any] = {"name": "j", "script": "train.py", "workdir": str(tmp_path), **nodes, "env": environment}
    return TrainingJob.model_validate(fields)


@pytest.mark.parametrize(
    ("wanted", "spare", "ranks", "nodes", "short"),
    [
        (2, 0, 4, 2, []),
        (1, 1, 4, 2, []),
        (1, 0, 8, 1, []),
        (2, 0, 2, 4, []),
        (2, 0, 4, 4, [0, 1, 2, 3]),
        (1, 0, 8, 2, [0, 1]),
        (1, 0, 1, 12, [8, 9, 10, 11]),
        (8, 1, 1, 12, [8, 9, 10, 11]),
    ],
)
def test_a_job_gets_nodes_with_a_gpu_for_each_rank_or_is_refused(  # noqa: PLR0917 (a table)
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, spare: int, ranks: int, nodes: int, short: list[int]
) -> None:
    """On a machine of eight, spare nodes included; the others are no nodes for this job."""
    monkeypatch.setenv(VISIBLE, ",".join(EIGHT))
    asked, cluster = job(tmp_path, wanted, ranks, spare=spare), LocalCluster(nodes=nodes)
    assert short_of_gpus(asked, cluster) == {f"node-{number}" for number in short}
    refused = [one for one in checks(asked, cluster) if one.field == "nproc_per_node"]
    assert bool(refused) is (nodes - len(short) < wanted + spare)
    assert all(mentions(one.reason, "local nodes", "GPU") for one in refused)


def test_the_advice_is_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken: the job that was refused is not refused then."""
    monkeypatch.setenv(VISIBLE, ",".join(EIGHT))
    (problem,) = checks(job(tmp_path, 2, 4), LocalCluster(nodes=4))
    assert "`cluster: {kind: local, nodes: 2}`" in problem.cure
    assert checks(job(tmp_path, 2, 4), LocalCluster(nodes=2)) == []
    (problem,) = checks(job(tmp_path, 4, 4), LocalCluster(nodes=4))
    assert mentions(problem.cure, "8 ranks")
    assert checks(job(tmp_path, 4, 2), LocalCluster(nodes=4)) == []
    assert checks(job(tmp_path, 4, 4, visible=""), LocalCluster(nodes=4)) == []


def test_a_job_cannot_give_all_nodes_the_same_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would share them; a single node may have any."""
    monkeypatch.setenv(VISIBLE, ",".join(EIGHT))
    (problem,) = checks(job(tmp_path, 2, 2, visible="0,1"), LocalCluster(nodes=2))
    assert problem.field == "env"
    assert mentions(problem.reason, "0, 1")
    assert checks(job(tmp_path, 1, 2, visible="0,1"), LocalCluster(nodes=2)) == []


def test_a_machine_without_gpus_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of ranks on any number of nodes."""
    monkeypatch.setenv(VISIBLE, "")
    assert checks(job(tmp_path, 4, 64), LocalCluster(nodes=4)) == []
    assert short_of_gpus(job(tmp_path, 4, 64), LocalCluster(nodes=4)) == frozenset()
