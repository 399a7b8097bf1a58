"""Allocations of other jobs of the same user, on a real Slurm."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.cluster.interface import AllocationRequest
from holdfast.cluster.slurm.commands import COMMENT
from holdfast.cluster.slurm.nodes import SlurmNodes
from holdfast.spec import SlurmCluster
from tests.mentions import mentions
from tests.slurm.slurm_server import SlurmServer
from tests.waiting import wait_until


def test_a_job_reports_and_waits_for_its_own_allocations_only(
    slurm: SlurmServer, holdfast_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lists the nodes before a job begins sees all of the user's allocations; that they are not the job's is no end of them."""
    assert holdfast_home.is_dir()
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    label = ["--job-name=holdfast-other", f"--comment={COMMENT}other", "--output=/dev/null"]
    other = slurm.run("sbatch", "--parsable", *label, "--nodes=1", "--time=5", "--wrap", "sleep 300")
    nodes = SlurmNodes(SlurmCluster(kind="slurm", allocation="new", directory=str(tmp_path / "nodes")))
    messages = list[str]()
    try:
        wait_until(lambda: slurm.run("squeue", "--noheader", f"--jobs={other}", "--format=%T") == "RUNNING", seconds=60, explain=slurm.logs)
        assert set(nodes.names()) == set(slurm.names)
        assert [one.id for one in nodes.allocator.by_node.values()] == [other]
        nodes.allocator.begin("own", "own", tmp_path)
        assert nodes.allocator.by_node == {}
        nodes.allocator.request(AllocationRequest(nodes=1))

        def has_own() -> bool:
            messages.extend(nodes.allocator.new_messages())
            return bool(nodes.allocator.usable(time.time()))

        wait_until(has_own, seconds=60, explain=lambda: "\n".join([*messages, slurm.logs()]))
        assert not any(mentions(text, f"Slurm job {other}") or mentions(text, "ended") for text in messages), messages
    finally:
        nodes.allocator.close(end=True)
        nodes.close()
        slurm.run("scancel", other)
    wait_until(lambda: slurm.run("squeue", "--noheader") == "", seconds=60, explain=slurm.logs)
