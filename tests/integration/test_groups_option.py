"""`holdfast run --groups`: a module of others runs unchanged, survives the loss of a rank, and reports what a fault costs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from holdfast.history import History, models, queries
from tests.integration.conftest import PrefectServer
from tests.integration.test_run_command import SECONDS, Place
from tests.mentions import mentions
from tests.waiting import wait_until

EPOCHS = 60
MODULE = ["-m", "multigpu.train", str(EPOCHS), "5"]


@pytest.fixture
def place(tmp_path: Path, holdfast_home: Path, prefect_server: PrefectServer) -> Place:
    """Give a folder with the package, and a Prefect server at hand."""
    shutil.copytree(Path(__file__).with_name("multigpu"), tmp_path / "multigpu")
    return Place(tmp_path, holdfast_home, prefect_server)


def process_of(home: Path, rank: int) -> int:
    """Return the pid of the worker that writes the log of *rank*, or 0."""
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            log = str((process / "fd" / "1").readlink())
            if log.startswith(str(home)) and log.endswith(f"/rank-{rank}.log"):
                return int(process.name)
    return 0


@pytest.mark.long
def test_a_module_of_others_survives_a_killed_rank_and_learns_its_level(place: Place) -> None:
    """Its weights are those that it has under torchrun, and the sentence about the level stands in log, history and status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {name: value for name, value in place.environment.items() if not name.startswith("HOLDFAST_")}
    ran = subprocess.run(
        [*torchrun, *MODULE, "--snapshot_path", "calm.pt"], cwd=place.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (place.folder / "calm.pt.final").exists(), ran.stderr

    child = place.start("run", "--nproc-per-node", "2", "--name", "multi", *MODULE, "--snapshot_path", "hit.pt", "--pause", "0.05")
    log = place.home / "jobs" / "multi" / "logs" / "rank-0.log"
    wait_until(lambda: log.exists() and "Epoch 10 |" in log.read_text(), seconds=SECONDS, explain=place.log)
    os.kill(wait_until(lambda: process_of(place.home, 1), seconds=60), signal.SIGKILL)
    wait_until(lambda: "Resuming training from snapshot" in log.read_text(), seconds=SECONDS, explain=place.log)
    status, shown = place.done("status", "multi", "--json")
    said, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 0, said + place.log()

    calm, hit = (torch.load(place.folder / f"{name}.pt.final") for name in ("calm", "hit"))
    assert all(torch.equal(calm[name], value) for name, value in hit.items())
    sentence = json.loads(shown)["integration"]
    assert status == 0
    assert mentions(sentence, "no holdfast.session", "all ranks restart", "PyTorch's own")
    assert log.read_text().count(f"--- holdfast: {sentence}") == 2  # by rank 0 before the fault and after
    assert said.count(sentence) == 1
    with closing(History.open(place.history, create=False)) as history:
        job = queries.newest_job(history, "multi")
        events = [one.text for one in queries.by_job(history, models.JobEvent, [job.id])[job.id]]
    assert events.count(sentence) == 1
    wait_until(place.is_clean, seconds=SECONDS)
