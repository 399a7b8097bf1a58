"""The deployments that we ship work with a real Prefect server and worker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import queries
from holdfast.history.looks import verdicts
from holdfast.history.store import History
from tests.integration.conftest import PrefectServer
from tests.integration.test_prefect_shows import asked
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
POOL = "holdfast"
DEPLOYMENT = "training-job/train"
HEALTH = "cluster-health/check-nodes"
REPAIR = "node-repair/repair-nodes"
RETRIES = {"PREFECT_FLOWS_DEFAULT_RETRIES": "2", "PREFECT_FLOWS_DEFAULT_RETRY_DELAY_SECONDS": "1"}
"""What a site may have set for its own flows: Prefect from 3.9.1 on would do a failed job again."""


def prefect(server: PrefectServer, *args: str, failing: bool = False, cwd: Path = ROOT) -> str:
    """Run the `prefect` command line in *cwd*; return what it said, or fail with it unless it is *failing* that is asked for."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", *args]
    done = subprocess.run(command, cwd=cwd, env=server.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) is failing, said
    return said


@pytest.fixture(scope="module")
def worker(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a worker on the pool; give its log, end it at last."""
    place = tmp_path_factory.mktemp("worker")
    log = place / "worker.log"
    # The worker's folder is not the checkout: the flow is found as a module, installed or (PYTHONPATH) not.
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    told = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PYTHONPATH": str(ROOT), "HOLDFAST_LOG": "json"}
    environment = prefect_server.environment | told | RETRIES
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until(lambda: b"started" in log.read_bytes() or child.poll() is not None, seconds=60, explain=log.read_text)
        assert child.poll() is None, log.read_text()
        yield log
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture(scope="module")
def deployed(prefect_server: PrefectServer) -> str:
    """Make the work pool and deploy by the file that we ship; schedules are paused, or they would start runs in the middle of a test."""
    prefect(prefect_server, "work-pool", "create", POOL, "--type", "process", "--overwrite")
    prefect(prefect_server, "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    paused(prefect_server, paused=True)
    return DEPLOYMENT


def scheduled(server: PrefectServer) -> list[dict[str, Any]]:
    """Return the deployments that have a schedule."""
    return [one for one in asked(server, "deployments/filter") if one["schedules"]]


def change(server: PrefectServer, method: str, path: str, **fields: Any) -> None:
    """Change something by the API; wait while SQLite is locked, as Prefect's own client does."""
    data, headers = json.dumps(fields).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/{path}", data=data, headers=headers, method=method)  # noqa: S310 (our own http address)

    def done() -> bool:
        try:
            return bool(urllib.request.urlopen(request, timeout=10).status)  # noqa: S310 (our own http address)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False

    wait_until(done, seconds=60)


def paused(server: PrefectServer, *, paused: bool) -> None:
    """Pause the schedules of all deployments, or have them go on."""
    for one in scheduled(server):
        change(server, "POST", f"deployments/{one['id']}/{'pause' if paused else 'resume'}_deployment")


def server_log(server: PrefectServer) -> list[str]:
    """Return the lines of the server's log."""
    return (Path(server.environment["PREFECT_HOME"]) / "server.log").read_text().splitlines()


def test_scheduled_deployments_get_runs_that_start_on_their_own(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """The scheduler makes runs of every deployment that has a schedule, the worker runs one to its end, and the server logs no error."""
    assert deployed
    before = len(server_log(prefect_server))
    ours = scheduled(prefect_server)
    assert {one["name"]: [schedule["schedule"]["interval"] for schedule in one["schedules"]] for one in ours} == {
        "check-nodes": [300.0],
        "repair-nodes": [600.0],
    }
    assert len({tuple(one["tags"]) for one in asked(prefect_server, "deployments/filter")}) == 3

    def runs(deployment: dict[str, Any], *types: str) -> list[dict[str, Any]]:
        chosen = {"deployment_id": {"any_": [deployment["id"]]}, "state": {"type": {"any_": list(types)}}}
        return [one for one in asked(prefect_server, "flow_runs/filter", flow_runs=chosen) if one["auto_scheduled"]]

    try:
        paused(prefect_server, paused=False)
        wait_until(lambda: all(runs(one, "SCHEDULED") for one in ours), seconds=120)
        paused(prefect_server, paused=True)
        for one in ours:  # as it is but for the time between two runs: the first one would come at the next five minutes of the clock
            (schedule,) = one["schedules"]
            often = {**schedule["schedule"], "interval": 10}
            change(prefect_server, "PATCH", f"deployments/{one['id']}/schedules/{schedule['id']}", active=True, schedule=often)
        paused(prefect_server, paused=False)
        wait_until(lambda: all(runs(one, "COMPLETED") for one in ours), seconds=120, explain=worker.read_text)
    finally:
        paused(prefect_server, paused=True)
    wait_until(lambda: not any(runs(one, "SCHEDULED", "PENDING", "RUNNING") for one in ours), seconds=120, explain=worker.read_text)
    assert [line for line in server_log(prefect_server)[before:] if re.search(r"ERROR|CRITICAL|Traceback|Exception", line)] == []


def test_deployed_flows_run_to_their_end(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """Deploy, start a job and a look at its cluster from Prefect's command line, and see both in Prefect and in the history."""
    job = {"name": "deployed", "command": [sys.executable, "-c", "print('trained')"], "directory": str(worker.parent), "progress": "none"}
    cluster = {"kind": "local", "name": "deployed", "nodes": 1}
    params, before = json.dumps({"job": job, "cluster": cluster}), len(worker.read_text())
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
    told = [
        json.loads(line) for line in worker.read_text()[before:].splitlines() if line.startswith("{")
    ]  # the worker's own lines are Prefect's
    moves = [one["facts"]["after"] for one in told if one.get("event") == "job.moved" and one["facts"]["job"] == "deployed"]
    # as short a job may end while its flow still waits for the last rank to start
    assert moves in (["RUNNING", "COMPLETED"], ["COMPLETED"]), worker.read_text()
    ends = [one for one in told if one["logger"] == "prefect.flow_runs" and "Completed" in one["message"]]
    assert len({one["pid"] for one in ends}) == 2, worker.read_text()


def test_a_mistake_in_a_deployed_flows_parameters_ends_it_in_words(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """No traceback, neither in Prefect's message nor in the worker's log, and no retry, although the worker's settings ask for some."""
    assert deployed
    params = json.dumps({"cluster": {"kind": "local", "name": "deployed", "nodes": 1}, "nodes": ["node-7"]})
    said = prefect(prefect_server, "deployment", "run", REPAIR, "--params", params, "--watch", failing=True)
    assert "node-7" in said, f"{said}\n{worker.read_text()}"
    wait_until(lambda: "Finished in state Failed" in worker.read_text(), seconds=60, explain=worker.read_text)
    assert "Traceback" not in worker.read_text()
    run = asked(prefect_server, "flow_runs/filter", flow_runs={"id": {"any_": [id_in(said)]}})[0]
    assert (run["state_type"], run["run_count"]) == ("FAILED", 1), "it was done again: a site's default of retries is not for our flows"


def test_a_flow_that_a_worker_runs_lets_go_of_its_job_and_the_next_run_adopts_it(
    prefect_server: PrefectServer, deployed: str, worker: Path
) -> None:
    """The rank notices nothing; Prefect shows the first run as cancelled with the reason, and the second one brings the job to its end."""
    done = worker.parent / "done"
    script = f"import time, pathlib\nwhile not pathlib.Path({str(done)!r}).exists(): time.sleep(0.1)\nprint('trained')"
    job = {"name": "passed-on", "command": [sys.executable, "-c", script], "directory": str(worker.parent), "progress": "none"}
    params = json.dumps({"job": job, "cluster": {"kind": "local", "name": "passed-on", "nodes": 1}})
    with closing(History.open(f"sqlite:///{prefect_server.home / 'history.db'}", create=True)) as history:
        first = started(prefect_server, deployed, params)
        wait_until(lambda: state_of(history, "passed-on") == "RUNNING", seconds=120, explain=worker.read_text)
        command = [sys.executable, "-m", "holdfast", "hand-over", "passed-on"]
        said = subprocess.run(command, env=prefect_server.environment, capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{said.stderr}\n{worker.read_text()}"
        assert "the flow has let go of job 'passed-on'" in said.stdout
        wait_until(lambda: ended(prefect_server, first), seconds=60, explain=worker.read_text)
        kind, message = ended(prefect_server, first)
        assert kind == "CANCELLED", message
        assert message.startswith("handed over, the job trains on: "), message

        second = started(prefect_server, deployed, params)
        row = queries.newest_job(history, "passed-on")
        adopted = lambda: any(one.text.startswith("a new flow adopted") for one in queries.remarks(history, row.id))  # noqa: E731
        wait_until(adopted, seconds=120, explain=worker.read_text)
        done.touch()
        wait_until(lambda: state_of(history, "passed-on") == "COMPLETED", seconds=60, explain=worker.read_text)
        assert len(queries.generations(history, row.id)) == 1, "the rank was started again"
    wait_until(lambda: ended(prefect_server, second), seconds=60, explain=worker.read_text)
    assert ended(prefect_server, second)[0] == "COMPLETED"


def ended(server: PrefectServer, run: str) -> tuple[str, ...]:
    """Return how a flow run ended, and the words for it; nothing while it has not."""
    state = asked(server, "flow_runs/filter", flow_runs={"id": {"any_": [run]}})[0]["state"]
    return (state["type"], state["message"] or "") if state["type"] in {"COMPLETED", "CANCELLED", "FAILED", "CRASHED"} else ()


def started(server: PrefectServer, deployment: str, params: str) -> str:
    """Have a worker run the deployment, and return the id of the run."""
    said = prefect(server, "deployment", "run", deployment, "--params", params)
    return id_in(said)


def id_in(said: str) -> str:
    """Return the id of the run that `prefect deployment run` told of."""
    return said.partition("UUID: ")[2].split()[0]


def state_of(history: History, job: str) -> str:
    """Return the state of the job of that name; empty before it has one."""
    rows = queries.jobs(history, job, limit=1)
    move = queries.state_of(history, rows[0].id) if rows else None
    return move.after if move else ""
