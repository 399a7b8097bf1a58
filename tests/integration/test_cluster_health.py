"""The cluster-health flow against a real Prefect server: a table of nodes, and events for what changed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from holdfast.cluster.local import LocalNodes
from holdfast.flows.cluster_health import cluster_health
from holdfast.history import History
from holdfast.history.health_samples import health_by_node
from tests.history.rows import health_changes
from tests.integration.conftest import PrefectServer
from tests.integration.test_prefect_shows import asked
from tests.mentions import one_line_mentions
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
RUN = """
from holdfast.flows.cluster_health import cluster_health
from holdfast.spec import LocalCluster
cluster_health(LocalCluster(name="checked", nodes=3), sweeps=2, every=0.01)
"""


def test_nodes_are_shown_and_only_changes_reported(prefect_server: PrefectServer) -> None:
    """Two sweeps a run, two runs; between these one node is switched off. A node that stays as it is causes no event."""
    nodes = LocalNodes("checked", prefect_server.home / "clusters/checked", 3)
    run(prefect_server)
    nodes.power_off("node-1")
    run(prefect_server)

    by_name = {"name": {"any_": ["health of checked"]}}
    first, second = asked(prefect_server, "flow_runs/filter", flow_runs=by_name, sort="START_TIME_ASC")
    assert [one["state_type"] for one in (first, second)] == ["COMPLETED"] * 2
    assert "3 nodes: " in first["state"]["message"]
    assert "3 nodes: 1 unreachable (node-1), " in second["state"]["message"]
    verbs = ("probe", "assess", "record", "publish")
    tasks = wait_until(lambda: ended_tasks(prefect_server, by_name, 4 * len(verbs)), seconds=60)
    assert sorted(one["name"] for one in tasks) == sorted(4 * [f"{verb} the nodes of checked" for verb in verbs]), "one task a sweep"
    said = [one["state"]["message"] for one in tasks]
    assert all(said), "each says what it did"
    assert any(one_line_mentions(one, "2 of 3", "node-1") for one in said)
    assert any(words.startswith("node-1: ") for words in said), "the change is reported where it was found"

    pages = asked(prefect_server, "artifacts/filter", artifacts={"key": {"any_": ["checked-nodes"]}}, sort="CREATED_DESC")
    page = pages[0]["data"]
    assert page.index("| node-1 | unreachable |") < page.index("| node-0 | "), "what needs a person comes first"
    assert one_line_mentions(page, "**node-1**", "unreachable since", "UTC", "no answer", "powered on")
    assert pages[0]["flow_run_id"] == second["id"]

    wait_until(lambda: unreachable(prefect_server), seconds=60)
    with closing(History.open(f"sqlite:///{prefect_server.home / 'history.db'}", create=False)) as history:
        changes = [(one.node, one.after) for one in health_changes(history, "checked")]
        assert changes.count(("node-1", "unreachable")) == 1
        assert health_by_node(history, "checked")["node-1"].status == "unreachable"
    assert len(unreachable(prefect_server)) == 1


def ended_tasks(server: PrefectServer, which: dict[str, Any], least: int) -> list[dict[str, Any]]:
    """Return the task runs that have ended, once there are so many: the server takes task runs in behind the flow."""
    rows = asked(server, "task_runs/filter", flow_runs=which)
    ended = [one for one in rows if one["state_type"] == "COMPLETED"]
    return ended if len(ended) >= least else []


def run(server: PrefectServer) -> None:
    """Run the flow once, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, env=server.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def unreachable(server: PrefectServer) -> list[dict[str, Any]]:
    """Return the events of nodes that became unreachable."""
    nodes = [f"holdfast.node.checked.node-{number}" for number in range(3)]
    wanted = {"event": {"name": ["holdfast.node.unreachable"]}, "resource": {"id": nodes}}
    return list(asked(server, "events/filter", filter=wanted, limit=50)["events"])


def test_a_look_is_one_look_by_default() -> None:
    """A run that waits for further looks would stand in the UI as running for minutes."""
    assert inspect.signature(cluster_health.fn).parameters["sweeps"].default == 1
