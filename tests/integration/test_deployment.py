"""The deployments that we ship work with a real Prefect server and worker."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast.history import queries
from holdfast.history.health_samples import health_by_node
from holdfast.history.store import History
from tests.integration.conftest import PrefectServer, prefect_server_in
from tests.integration.prefect_api import ask
from tests.integration.test_prefect_shows import asked
from tests.mentions import one_line_mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

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
def prefect_server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[PrefectServer]:
    """Have a server for the tests of one file: flows that other tests kill lock a shared one, and cut connections are errors in its log."""
    with prefect_server_in(tmp_path_factory.mktemp("server"), tmp_path_factory, prefect_database) as server:
        yield server


@pytest.fixture(scope="module")
def worker(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a worker on the pool; give its log, end it at last."""
    place = tmp_path_factory.mktemp("worker")
    log = place / "worker.log"
    # The worker's folder is not the checkout: the flow is found as a module, installed or (PYTHONPATH) not.
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    variables = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PYTHONPATH": str(ROOT), "HOLDFAST_LOG": "json"}
    environment = prefect_server.environment | variables | RETRIES
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
    """Change something by the API."""
    ask(f"{server.url}/{path}", fields, method=method)


def paused(server: PrefectServer, *, paused: bool) -> None:
    """Pause the schedules of all deployments, or have them go on."""
    for one in scheduled(server):
        change(server, "POST", f"deployments/{one['id']}/{'pause' if paused else 'resume'}_deployment")


def server_log(server: PrefectServer) -> str:
    """Return what the server logged."""
    return (Path(server.environment["PREFECT_HOME"]) / "server.log").read_text()


def errors_in(log: str) -> list[str]:
    """Return the errors in a server's log, but for those of SQLite on a busy machine, which Prefect tries again."""
    entries = re.split(r"^(?=\d\d:\d\d:\d\d\.\d{3} \| )", log, flags=re.MULTILINE)
    return [one for one in entries if re.search(r"ERROR|CRITICAL|Traceback|Exception", one) and "database is locked" not in one]


def submit(server: PrefectServer, **filled_in: Any) -> dict[str, Any]:
    """Start a training job as the form of the UI does: with the default of each field that is left alone. Return the answer of the API."""
    (one,) = asked(server, "deployments/filter", deployments={"name": {"any_": [DEPLOYMENT.partition("/")[2]]}})
    fields = one["parameter_openapi_schema"]["properties"]
    parameters = {name: field["default"] for name, field in fields.items() if "default" in field} | filled_in
    body = {"state": {"type": "SCHEDULED"}, "parameters": parameters, "enforce_parameter_schema": True, "idempotency_key": str(uuid4())}

    try:
        return dict(asked(server, f"deployments/{one['id']}/create_flow_run", **body))
    except httpx.HTTPStatusError as error:
        return {"status": error.response.status_code, **error.response.json()}


def job_in(worker: Path, name: str, script: str) -> dict[str, Any]:
    """Return what is filled in for a job that runs a line of Python on a cluster of its own, as the API takes it."""
    cluster = {"kind": "local", "name": name, "nodes": 1}
    program = shlex.join([sys.executable, "-c", script])
    return {"name": name, "script": program, "workdir": str(worker.parent), "cluster": cluster, "advanced": {"progress": "none"}}


def test_scheduled_deployments_get_runs_that_start_on_their_own(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """The scheduler makes runs of every deployment that has a schedule, the worker runs one to its end, and the server logs no error."""
    assert deployed
    before = len(server_log(prefect_server))
    ours = scheduled(prefect_server)
    assert {one["name"]: [schedule["schedule"]["interval"] for schedule in one["schedules"]] for one in ours} == {
        "check-nodes": [300.0],
        "repair-nodes": [600.0],
    }
    shipped = asked(prefect_server, "deployments/filter")
    assert len({tuple(one["tags"]) for one in shipped}) == len(shipped) == 3

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
    assert errors_in(server_log(prefect_server)[before:]) == []


def test_deployed_flows_run_to_their_end(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """Deploy, submit the run form with a name and a program, look at the job's cluster, and see both in Prefect and in the history."""
    assert deployed
    before, cluster = len(worker.read_text()), {"kind": "local", "name": "deployed", "nodes": 1}
    run = submit(prefect_server, **job_in(worker, "deployed", "print('trained')"))
    wait_until(lambda: ended(prefect_server, run["id"]), seconds=120, explain=worker.read_text)
    assert ended(prefect_server, run["id"])[0] == "COMPLETED", worker.read_text()
    checked = json.dumps({"cluster": cluster, "sweeps": 1})
    said = prefect(prefect_server, "deployment", "run", HEALTH, "--params", checked, "--watch")
    assert one_line_mentions(said, "successfully", "'Completed'"), f"{said}\n{worker.read_text()}"
    with closing(History.open(f"sqlite:///{prefect_server.home / 'history.db'}", create=False)) as history:
        assert list(health_by_node(history, "deployed")) == ["node-0"]
        move = queries.state_of(history, queries.newest_job(history, "deployed").id)
    assert move is not None
    assert move.after == "COMPLETED"
    lines = worker.read_text()[before:].splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]  # the worker's own lines are Prefect's
    moves = [one["facts"]["after"] for one in records if one.get("event") == "job.moved" and one["facts"]["job"] == "deployed"]
    # as short a job may end while its flow still waits for the last rank to start
    assert moves in (["RUNNING", "COMPLETED"], ["COMPLETED"]), worker.read_text()
    ends = {one["pid"]: one["message"] for one in records if one["logger"] == "prefect.flow_runs" and "Completed" in one["message"]}
    assert {one["pid"] for one in records if one.get("event") == "job.moved"} < ends.keys(), worker.read_text()
    assert any("1 node: 1 healthy" in message for message in ends.values()), worker.read_text()


def test_what_is_filled_in_wrong_is_refused_before_there_is_a_run(prefect_server: PrefectServer, deployed: str) -> None:
    """The server names the field and says what it expects; the defaults alone lack no more than a name and a program."""
    assert deployed

    def runs_of_it() -> int:
        return int(asked(prefect_server, "flow_runs/count", deployments={"name": {"any_": [DEPLOYMENT.partition("/")[2]]}}))

    good, before = {"name": "refused", "script": "/data/train.py"}, runs_of_it()
    for wrong, words in (
        ({}, "'name' is a required property"),
        ({"name": "refused"}, "'script' is a required property"),
        ({**good, "name": "Bad Name"}, "'name'. Failure reason: 'lowercase letters, digits and dashes, at most 63' was expected"),
        ({**good, "script": "train.py"}, "'an absolute path, such as /data/train.py, or a command, such as python -m gpt' was expected"),
        ({**good, "advanced": {"checkpoint": {"kep": 3}}}, "'advanced.checkpoint'. Failure reason: Additional properties are not allowed"),
    ):
        answer = submit(prefect_server, **wrong)
        assert (answer.get("status"), words in str(answer.get("detail"))) == (409, True), answer
    assert runs_of_it() == before


def test_what_only_the_worker_can_know_ends_the_run_in_a_sentence(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """A script that is not there, and a cluster that nobody saved; one that somebody saved in Prefect is found. No node is started."""
    assert deployed
    (worker.parent / "train.py").touch()
    prefect(prefect_server, "variable", "set", "gpu-lab", "kind: local\nname: gpu-lab\nnodes: 1\n", "--overwrite")
    missing = submit(prefect_server, name="no-script", script="/nowhere/train.py", cluster="variable:gpu-lab")
    unknown = submit(prefect_server, name="no-cluster", script=str(worker.parent / "train.py"), cluster="gpu-labb")
    for run, words in (
        (missing, "the job was not started: script: /nowhere/train.py does not exist. Fix the path"),
        (unknown, "no cluster is called 'gpu-labb'. Known here, blocks aside: local, gpu-lab. Save others: "),
    ):
        wait_until(lambda run=run: ended(prefect_server, run["id"]), seconds=120, explain=worker.read_text)  # type: ignore[misc]
        kind, message = ended(prefect_server, run["id"])
        assert kind == "FAILED"
        assert words in message
    assert not (prefect_server.home / "clusters" / "gpu-lab").exists()


def test_a_mistake_in_a_deployed_flows_parameters_ends_it_in_words(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """No traceback, neither in Prefect's message nor in the worker's log, and no retry, although the worker's settings ask for some."""
    assert deployed
    before = len(worker.read_text())
    given = ("-p", "cluster=local:1", "-p", 'nodes=["node-7"]')
    said = prefect(prefect_server, "deployment", "run", REPAIR, *given, "--watch", failing=True)
    assert "node-7" in said, f"{said}\n{worker.read_text()}"
    wait_until(lambda: "Finished in state Failed" in worker.read_text()[before:], seconds=60, explain=worker.read_text)
    assert "Traceback" not in worker.read_text()[before:]
    run = asked(prefect_server, "flow_runs/filter", flow_runs={"id": {"any_": [id_in(said)]}})[0]
    assert (run["state_type"], run["run_count"]) == ("FAILED", 1), "it was done again: a site's default of retries is not for our flows"


def test_a_flow_that_a_worker_runs_detaches_and_the_next_run_reattaches(prefect_server: PrefectServer, deployed: str, worker: Path) -> None:
    """The rank notices nothing; Prefect shows the first run as cancelled with the reason, and the second one brings the job to its end."""
    done = worker.parent / "done"
    script = f"import time, pathlib\nwhile not pathlib.Path({str(done)!r}).exists(): time.sleep(0.1)\nprint('trained')"
    form = job_in(worker, "passed-on", script)
    with closing(History.open(f"sqlite:///{prefect_server.home / 'history.db'}", create=True)) as history:
        first = submit(prefect_server, **form)["id"]
        wait_until(lambda: state_of(history, "passed-on") == "RUNNING", seconds=120, explain=worker.read_text)
        command = [sys.executable, "-m", "holdfast", "detach", "passed-on"]
        said = subprocess.run(command, env=prefect_server.environment, capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{said.stderr}\n{worker.read_text()}"
        assert one_line_mentions(said.stdout, "detached", "'passed-on'")
        wait_until(lambda: ended(prefect_server, first), seconds=60, explain=worker.read_text)
        kind, message = ended(prefect_server, first)
        assert kind == "CANCELLED", message
        assert message.startswith("detached, training continues: "), message

        second = submit(prefect_server, **form)["id"]
        row = queries.newest_job(history, "passed-on")
        reattached = lambda: any(one.text.startswith("a new flow reattached") for one in queries.job_events(history, row.id))  # noqa: E731
        wait_until(reattached, seconds=120, explain=worker.read_text)
        done.touch()
        wait_until(lambda: state_of(history, "passed-on") == "COMPLETED", seconds=60, explain=worker.read_text)
        assert len(queries.generations(history, row.id)) == 1, "the rank was started again"
    wait_until(lambda: ended(prefect_server, second), seconds=60, explain=worker.read_text)
    assert ended(prefect_server, second)[0] == "COMPLETED"


def ended(server: PrefectServer, run: str) -> tuple[str, ...]:
    """Return how a flow run ended, and the words for it; nothing while it has not."""
    state = asked(server, "flow_runs/filter", flow_runs={"id": {"any_": [run]}})[0]["state"]
    return (state["type"], state["message"] or "") if state["type"] in {"COMPLETED", "CANCELLED", "FAILED", "CRASHED"} else ()


def id_in(said: str) -> str:
    """Return the id of the run that `prefect deployment run` printed."""
    return said.partition("UUID: ")[2].split()[0]


def state_of(history: History, job: str) -> str:
    """Return the state of the job of that name; empty before it has one."""
    rows = queries.jobs(history, job, limit=1)
    move = queries.state_of(history, rows[0].id) if rows else None
    return move.after if move else ""
