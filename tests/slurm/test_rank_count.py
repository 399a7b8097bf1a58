"""`nproc_per_node: auto | gpu` on nodes of a real Slurm: each is asked within its allocation, for what Slurm gives the job there."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.supervise import control_job
from holdfast.history import History, queries
from holdfast.host.gpu_assignment import VISIBLE
from holdfast.policies.states import Event, State
from holdfast.spec import SlurmCluster, TrainingJob
from tests.control.launches import COUNTS, ends, launched
from tests.mentions import mentions
from tests.slurm.slurm_server import SlurmServer


@pytest.fixture
def cluster(slurm: SlurmServer, holdfast_home: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give what describes the cluster with further fields; its allocations are gone at the end."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield lambda **fields: SlurmCluster.model_validate({"kind": "slurm", "allocation": "new", "directory": str(tmp_path / "n"), **fields})
    slurm.run("scancel", "--quiet", "--partition=train")
    slurm.mend()


def job(folder: Path, nproc: str, nodes: int, **more: Any) -> TrainingJob:
    """Return a job whose ranks write down how many of them are on their node."""
    fields = {"name": "counts", "command": [sys.executable, "-c", COUNTS], "workdir": str(folder), "nproc_per_node": nproc, "nnodes": nodes}
    return TrainingJob.model_validate({**fields, "preflight": False, "checkpoint": {"directory": str(folder / "checkpoints")}, **more})


@pytest.mark.parametrize(("gpus", "ranks"), [({"gpus": 2}, 2), pytest.param({}, len(os.sched_getaffinity(0)), marks=pytest.mark.long)])
def test_a_rank_for_each_gpu_of_the_allocation_and_for_each_cpu_without_any(
    cluster: Any, gpus: dict[str, int], ranks: int, tmp_path: Path
) -> None:
    """The number is on record, for whoever takes the job over."""
    hidden = {} if gpus else {"env": {VISIBLE: ""}}  # a machine with GPUs shows them to jobs that requested none
    with control_job(job(tmp_path, "auto", 1, **hidden), cluster(**gpus)) as run:
        assert isinstance(run, JobController)
        ends(run, launched(run))
        assert run.state is State.COMPLETED, run.reason
    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == {f"rank-{rank}": str(ranks) for rank in range(ranks)}
    with closing(History.open()) as history:
        assert queries.newest_job(history, "counts").spec["nproc_per_node"] == ranks


@pytest.mark.long
def test_nodes_that_differ_end_the_launch_with_both_names_and_numbers(cluster: Any, slurm: SlurmServer, tmp_path: Path) -> None:
    """A prolog hides the broken GPU of one: no rank is started."""
    one, other = slurm.names
    with (
        slurm.exports(one, VISIBLE, "0,1"),
        slurm.exports(other, VISIBLE, "1"),
        control_job(job(tmp_path, "gpu", 2), cluster()) as run,
    ):
        assert isinstance(run, JobController)
        turn = launched(run)
        assert turn.event is Event.FAILED
        assert mentions(turn.reason, "nproc_per_node", f"{one}: 2 GPUs", f"{other}: 1 GPU")
        run.move(turn.event, turn.reason)
    assert not list(tmp_path.glob("rank-*"))
