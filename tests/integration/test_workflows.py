"""Building blocks in users' own flows, on a real server: the example with a fault in the middle, and what each block answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.cluster.local import LocalNodes
from holdfast.history import History, queries
from holdfast.host.process import marked
from holdfast.testing.chaos import Chaos
from tests.integration.conftest import PrefectServer
from tests.integration.test_deployment import POOL, ended, id_in, prefect, prefect_server, state_of, worker
from tests.integration.test_prefect_shows import asked
from tests.mentions import mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

__all__ = ["prefect_server", "worker"]  # fixtures

ROOT = Path(__file__).parents[2]
STEPS = 1000


def started(server: PrefectServer, deployment: str, params: str) -> str:
    """Have a worker run the deployment, and return the id of the run."""
    return id_in(prefect(server, "deployment", "run", deployment, "--params", params))


@pytest.fixture(scope="module")
def pool(prefect_server: PrefectServer) -> str:
    """Make the work pool."""
    prefect(prefect_server, "work-pool", "create", POOL, "--type", "process", "--overwrite")
    return POOL


@pytest.fixture
def history(prefect_server: PrefectServer) -> Iterator[History]:
    """Give the history that the flows of the Prefect server write."""
    with closing(History.open(f"sqlite:///{prefect_server.home / 'history.db'}")) as opened:
        yield opened


def has_exited(run: str) -> bool:
    """Return whether the process of a flow run is gone: one that is left when the server ends would wait for it."""
    return not list(marked("PREFECT__FLOW_RUN_ID", run))


@pytest.mark.timeout(600)  # five programs one after another, each of which imports torch or Prefect
def test_the_example_workflow_trains_evaluates_and_publishes_through_a_killed_rank(
    prefect_server: PrefectServer, pool: str, worker: Path, history: History, tmp_path: Path
) -> None:
    """Deployed as the example says; the incident costs the flow nothing, and what is published is the checkpoint of the last step."""
    (tmp_path / "cluster.yaml").write_text("kind: local\nname: racks\nnodes: 3\n")
    prefect(prefect_server, "deploy", "--all", "--prefect-file", "examples/prefect.yaml")
    params = {"name": "flowing", "cluster_file": str(tmp_path / "cluster.yaml"), "steps": STEPS, "folder": str(tmp_path)}
    run = started(prefect_server, "train-and-publish/example", json.dumps(params))

    chaos = Chaos(LocalNodes("racks", prefect_server.home / "clusters/racks", 3), history, "flowing")
    wait_until(lambda: chaos.step() >= 10 and chaos.complete(), seconds=200, explain=worker.read_text)
    victim = chaos.ranks()[1]
    chaos.kill(1)
    wait_until(lambda: has_exited(run), seconds=200, explain=worker.read_text)
    assert ended(prefect_server, run)[0] == "COMPLETED", worker.read_text()

    job = queries.newest_job(history, "flowing")
    (incident,) = queries.incidents(history, job.id)
    assert (incident.kind, incident.outcome, incident.target) == ("worker-sigkill", "recovered", f"rank 1 on {victim.node}")

    (page,) = asked(prefect_server, "artifacts/filter", artifacts={"key": {"any_": ["flowing-published"]}})
    assert f"| Step | {STEPS} |" in page["data"]
    assert "| Incidents while training | 1 |" in page["data"]
    published = torch.load(tmp_path / "published" / f"flowing-step-{STEPS}.pt", weights_only=False)
    assert "embedding.weight" in published["model"]

    names = [
        "prepare data",
        "probe cluster racks",
        "wait for 2 nodes of racks",
        "describe job flowing",
        "training-job-0",
        "evaluate flowing at its latest checkpoint",
        f"publish step {STEPS}",
    ]
    wait_until(lambda: list(task_states(prefect_server, flow_runs={"id": {"any_": [run]}})) == names, seconds=60)


BLOCKS = """
import json, sys
from pathlib import Path
from prefect import flow
from prefect.exceptions import FailedRun
from holdfast.cluster.local import LocalNodes
from holdfast.spec import cluster_of
from holdfast.workflows import *

found = {}

def refused(key, act):
    try:
        act()
    except Exception as error:
        found[key] = [type(error).__name__, str(error)]

def job(name, code):
    return TrainingJob(name=name, command=[sys.executable, "-c", code], progress="none")

@flow(retries=0)
def uses_all_blocks():
    quick = {"disk_size": "4MiB", "network_size": "1MiB", "max_memory": "8MiB", "torch": False, "nice": 0}
    def cluster(disk):
        limits = {"min_disk_bandwidth": disk, "min_network_bandwidth": 0, "max_latency": 0}
        return cluster_of({"name": "blocks", "nodes": 2, "burn_in": {**quick, "thresholds": limits}})
    two = cluster(0)
    found["probed"] = [one.node for one in probe_cluster(two).nodes]
    found["burned in"] = [[one.node, one.outcome, one.state] for one in burn_in_nodes(two, ["node-0"], seconds=0.05).nodes]
    refused("burn-in", lambda: burn_in_nodes(cluster("1000TB"), ["node-0"], seconds=0.05))
    refused("stranger", lambda: burn_in_nodes(two, ["node-7"], seconds=0.05))
    LocalNodes.of(two).power_off("node-1")
    refused("probe", lambda: probe_cluster(two, min_healthy=2))
    refused("capacity", lambda: wait_for_capacity(two, nodes=2, timeout_seconds=0.1, poll_seconds=0.05))
    LocalNodes.of(two).power_on("node-1")
    trained = training_job(job=job("block-ok", "print('trained')"), cluster=two)
    found["trained"] = [type(trained).__name__, trained.job, trained.state, trained.incidents]
    refused("training", lambda: training_job(job=job("block-bad", "1 / 0"), cluster=two))
    state = training_job(job=job("block-bad", "1 / 0"), cluster=two, return_state=True)
    found["state"] = [state.type.value, state.message]
    found["looked up"] = training_result("block-bad").state
    refused("checkpoint", lambda: latest_checkpoint("block-ok"))
    refused("unknown", lambda: latest_checkpoint("block-never"))
    refused("evaluation", lambda: evaluate_checkpoint(trained, command=["true"]))
    Path(sys.argv[1]).write_text(json.dumps(found))

uses_all_blocks()
"""


def test_each_block_answers_with_a_value_or_fails_in_one_sentence(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """All in one flow: typed values where it goes well, an exception that names node or job, number and reason where it does not."""
    script = tmp_path / "blocks.py"
    script.write_text(BLOCKS)
    environment = prefect_server.environment | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert found["probed"] == ["node-0", "node-1"]
    assert found["burned in"] == [["node-0", "passed", "healthy"]]
    assert found["trained"] == ["TrainingResult", "block-ok", "COMPLETED", 0]
    kinds = {key: value[0] for key, value in found.items() if key in EXPECTED}
    assert kinds == {key: kind for key, (kind, _) in EXPECTED.items()}
    for key, (_, words) in EXPECTED.items():
        assert words in found[key][1]
        assert "\n" not in found[key][1]
    assert found["state"][0] == "FAILED"
    assert found["state"][1] == found["training"][1], "the exception says what the state says"
    assert found["looked up"] == "FAILED"

    by_flow = {"name": {"any_": ["uses-all-blocks"]}}
    names = {"probe cluster blocks", "burn in node-0 of blocks", "wait for 2 nodes of blocks", "latest checkpoint of block-ok"}
    wait_until(lambda: names <= task_states(prefect_server, flows=by_flow).keys(), seconds=60)
    states = task_states(prefect_server, flows=by_flow)
    assert mentions(states["wait for 2 nodes of blocks"]["message"], "'blocks'", 1, 2)


def task_states(server: PrefectServer, **which: Any) -> dict[str, dict[str, Any]]:
    """Return the state of each task run that has ended, by name, in their order; the server takes task runs in behind the flow."""
    rows = asked(server, "task_runs/filter", sort="EXPECTED_START_TIME_ASC", **which)
    return {row["name"]: row["state"] for row in rows if row["state_type"] in {"COMPLETED", "FAILED"}}


EXPECTED = {
    "burn-in": ("BurnInFailed", "1 node of cluster 'blocks' did not pass the burn-in: node-0 failed: disk: its disk wrote"),
    "stranger": ("UnknownNode", "cluster 'blocks' has no node 'node-7'"),
    "probe": ("TooFewHealthyNodes", "cluster 'blocks' has 1 healthy node, and 2 are required: node-1 unreachable"),
    "capacity": ("CapacityTimeout", "after 100 ms cluster 'blocks' has 1 free node of the 2 required (node-1: unreachable"),
    "training": ("FailedRun", "ZeroDivisionError: division by zero"),
    "checkpoint": ("NoCheckpoint", "job 'block-ok' has no complete checkpoint in "),
    "unknown": ("UnknownJob", "no job 'block-never' in the history"),
    "evaluation": ("NoCheckpoint", "job 'block-ok' has no complete checkpoint in "),
}


def test_a_cancelled_parent_stops_the_job_and_a_project_may_have_flows_of_its_own(
    prefect_server: PrefectServer, pool: str, worker: Path, history: History, tmp_path: Path
) -> None:
    """The flow lies in the package `flows` of a project of its own; a person cancels it, not the subflow, while the job runs."""
    package = tmp_path / "flows"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "names.py").write_text("NAME = 'nested'\n")
    (package / "nightly.py").write_text(NIGHTLY)
    (tmp_path / "prefect.yaml").write_text(
        f"deployments: [{{name: nightly, entrypoint: 'flows/nightly.py:nightly', work_pool: {{name: {pool}}}}}]\n"
    )
    prefect(prefect_server, "deploy", "--all", cwd=tmp_path)
    run = started(prefect_server, "nightly/nightly", "{}")
    explain = worker.read_text
    wait_until(lambda: ended(prefect_server, run) or state_of(history, "nested") == "RUNNING", seconds=120, explain=explain)
    assert not ended(prefect_server, run), worker.read_text()
    prefect(prefect_server, "flow-run", "cancel", run)
    wait_until(lambda: has_exited(run) and ended(prefect_server, run), seconds=120, explain=explain)
    assert ended(prefect_server, run)[0] == "CANCELLED"
    assert state_of(history, "nested") == "CANCELLED", worker.read_text()
    (nested,) = asked(prefect_server, "flow_runs/filter", flow_runs={"name": {"any_": ["train nested"]}})
    assert nested["parent_task_run_id"]
    assert nested["state"]["type"] == "CANCELLED"


NIGHTLY = """
import sys
from prefect import flow
from flows.names import NAME
from holdfast.workflows import LocalCluster, TrainingJob, training_job

@flow(retries=0)
def nightly():
    job = TrainingJob(name=NAME, command=[sys.executable, "-c", "import time; time.sleep(600)"], progress="none")
    return training_job(job=job, cluster=LocalCluster(name="nested", nodes=1))
"""
