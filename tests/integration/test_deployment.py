"""The deployments that we ship work with a real Prefect server and worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.history import queries
from holdfast.history.looks import verdicts
from holdfast.history.store import History
from tests.integration.conftest import PrefectServer
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
POOL = "holdfast"
DEPLOYMENT = "training-job/holdfast"
HEALTH = "cluster-health/holdfast"


def prefect(server: PrefectServer, *args: str) -> str:
    """Run the `prefect` command line; return what it said, or fail with it."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", *args]
    done = subprocess.run(command, cwd=ROOT, env=server.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.fixture
def worker(prefect_server: PrefectServer, tmp_path: Path) -> Iterator[Path]:
    """Start a worker on the pool; give its log, end it at last."""
    log = tmp_path / "worker.log"
    # The worker's folder is not the checkout: the flow is found as a module, installed or (PYTHONPATH) not.
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    environment = prefect_server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until(lambda: b"started" in log.read_bytes() or child.poll() is not None, seconds=60, explain=log.read_text)
        assert child.poll() is None, log.read_text()
        yield log
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture
def deployed(prefect_server: PrefectServer) -> str:
    """Make the work pool and deploy by the file that we ship."""
    prefect(prefect_server, "work-pool", "create", POOL, "--type", "process", "--overwrite")
    prefect(prefect_server, "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    return DEPLOYMENT


def test_deployed_flows_run_to_their_end(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """Deploy, start a job and a look at its cluster from Prefect's command line, and see both in Prefect and in the history."""
    job = {"name": "deployed", "command": [sys.executable, "-c", "print('trained')"], "directory": str(worker.parent), "progress": "none"}
    cluster = {"kind": "local", "name": "deployed", "nodes": 1}
    params = json.dumps({"job": job, "cluster": cluster})
    said = prefect(prefect_server, "deployment", "run", deployed, "--params", params, "--watch")
    assert "finished successfully in 'Completed'" in said, f"{said}\n{worker.read_text()}"
    checked = json.dumps({"cluster": cluster, "sweeps": 1})
    said = prefect(prefect_server, "deployment", "run", HEALTH, "--params", checked, "--watch")
    assert "finished successfully in 'Completed'" in said, f"{said}\n{worker.read_text()}"
    with closing(History.open(f"sqlite:///{prefect_server.home / 'history.db'}", create=False)) as history:
        assert list(verdicts(history, "deployed")) == ["node-0"]
        move = queries.state_of(history, queries.newest_job(history, "deployed").id)
    assert move is not None
    assert move.after == "COMPLETED"
