"""`holdfast` inside a batch job of a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.mentions import mentions
from tests.slurm.slurm_server import SlurmServer
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def test_a_job_file_without_a_cluster_means_the_allocation_that_it_is_submitted_in(slurm: SlurmServer, tmp_path: Path) -> None:
    """All of its ranks used to start on the batch host, without a message."""
    tmp_path.chmod(0o777)
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"name: a\nscript: train.py\nnnodes: 2\ncheckpoint: {{directory: {tmp_path}/c}}\n")
    said = tmp_path / "said"
    command = f"cd {tmp_path} && PYTHONPATH={ROOT} HOLDFAST_HOME={tmp_path}/h {sys.executable} -m holdfast validate job.yaml; echo over"
    number = slurm.run("sbatch", "--parsable", "--nodes=2", "--time=5", f"--output={said}", "--wrap", command)
    try:
        wait_until(lambda: said.exists() and "over" in said.read_text(), seconds=100, explain=slurm.logs)
    finally:
        slurm.run("scancel", number)
    text = " ".join(said.read_text().split())
    assert mentions(text, "train.py", "2 nodes", "cluster 'slurm'")
    assert mentions(text, f"Slurm job {number}")
    wait_until(lambda: slurm.run("squeue", "--noheader") == "", seconds=60, explain=slurm.logs)
