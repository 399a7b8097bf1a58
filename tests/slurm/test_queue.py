"""Which allocation a process runs in, asked of a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cluster.slurm.commands import in_queue
from tests.slurm.slurm_server import SlurmServer
from tests.waiting import wait_until

ARRAY = ["--array=7-8"]
HETEROGENEOUS = ["--nodes=1", ":", "--nodes=1"]


@pytest.mark.parametrize("options", [ARRAY, HETEROGENEOUS], ids=["array", "heterogeneous"])
def test_the_own_allocation_is_found_by_the_id_in_its_environment(
    slurm: SlurmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """It has a node and an end also as an element of an array, or a part of a heterogeneous job, which Slurm lists by another name."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    tmp_path.chmod(0o777)
    inside = f"echo $SLURMD_NODENAME > {tmp_path}/new.$SLURM_JOB_ID; mv {tmp_path}/new.$SLURM_JOB_ID {tmp_path}/$SLURM_JOB_ID; sleep 300"
    number = slurm.run("sbatch", "--parsable", "--time=5", f"--output={tmp_path}/out", *options, "--wrap", inside)

    def begun() -> list[Path]:
        return [one for one in tmp_path.iterdir() if one.name.isdigit()]

    try:
        wait_until(lambda: len(begun()) == (2 if options == ARRAY else 1), seconds=60, explain=slurm.logs)
        for path in begun():
            (one,) = in_queue("none", "", path.name)
            assert (one.id, one.nodes, one.is_running) == (path.name, (path.read_text().strip(),), True)
            assert one.ends is not None
    finally:
        slurm.run("scancel", number)
    wait_until(lambda: slurm.run("squeue", "--noheader") == "", seconds=60, explain=slurm.logs)
