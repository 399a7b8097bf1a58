"""The node-repair flow against a real Prefect server: a node returns to service by passing, or is decommissioned by failing."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import History, cordons
from holdfast.history.cordons import CordonTable
from holdfast.policies.nodes.cordons import CordonedFault, OperatorRequest, Owner, Rules
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.nodes.quarantine import cordon, quarantine, return_to_service
from tests.history.rows import service_moves
from tests.integration.conftest import PrefectServer
from tests.integration.test_prefect_shows import asked
from tests.mentions import mentions, one_line_mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
RUN = """
from holdfast.flows.node_repair import node_repair
from holdfast.spec import cluster_of

def cluster(disk):
    burn_in = {
        "disk_size": "4MiB", "network_size": "1MiB", "max_memory": "8MiB", "torch": False, "nice": 0,
        "thresholds": {"min_disk_bandwidth": disk, "min_network_bandwidth": 0, "max_latency": 0},
    }
    quarantine = {"burn_in_after": "0s", "decommission_after_failed": 2, "max_unavailable": "100%"}
    return cluster_of({"name": "mended", "nodes": 3, "burn_in": burn_in, "quarantine": quarantine})

node_repair(cluster(0), nodes=["node-1", "node-2"], seconds=0.05)
node_repair(cluster("1000TB"), seconds=0.05)
node_repair(cluster("1000TB"), seconds=0.05)
node_repair(cluster("1000TB"), seconds=0.05)
"""
PLACE = CordonTable(cluster="mended", names=["node-0", "node-1", "node-2"], rules=Rules(max_unavailable=1.0, cool=0.0, failures=2))


def test_nodes_come_back_by_passing_and_are_decommissioned_by_failing(prefect_server: PrefectServer) -> None:
    """Node-1 is healthy again, as memory and processors were exercised; node-0 fails twice, node-2 is cordoned by a person."""
    now = time.time()
    with closing(History.open(f"sqlite:///{prefect_server.home / 'history.db'}")) as history:
        faults = (CordonedFault(kind="memory-uncorrected"), CordonedFault(kind="cpu-machine-check", device="CPU 3"))
        word = OperatorRequest(owner=Owner(name="job gpt"), reason="memory-uncorrected: a word was lost", faults=faults, at=now)
        fan = OperatorRequest(owner=Owner(name="ann@desk", person=True), reason="new fan", at=now)
        for node in ("node-0", "node-1"):
            cordons.apply(history, PLACE, node, lambda one, ward: quarantine(one, word, ward), now=now)
        cordons.apply(history, PLACE, "node-2", lambda one, _: cordon(one, fan), now=now)
        done = subprocess.run(
            [sys.executable, "-c", RUN], cwd=ROOT, env=prefect_server.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        states = {name: one.state for name, one in cordons.nodes(history, PLACE, now=time.time()).items()}
        assert states == {"node-0": NodeState.DECOMMISSIONED, "node-1": NodeState.HEALTHY, "node-2": NodeState.CORDONED}
        moved = {node: [one.event for one in service_moves(history, "mended", node)] for node in PLACE.names}
        assert moved == {
            "node-0": ["quarantined", "tested", "failed", "tested", "decommissioned"],
            "node-1": ["quarantined", "tested", "passed"],
            "node-2": ["cordoned"],
        }
        last = service_moves(history, "mended", "node-0")[-1]
        assert last.owner == "node-repair"
        assert mentions(last.reason, "burn-in 2", "30 d", "disk")

    runs = asked(prefect_server, "flow_runs/filter", flow_runs={"name": {"any_": ["repair of mended"]}}, sort="START_TIME_ASC")
    messages = [one["state"]["message"] for one in runs]
    assert mentions(messages[0], "1 node", "1 passed", "1 not tested")
    assert all(mentions(message, "1 node", "1 failed", "node-0: disk") for message in messages[1:3])
    assert mentions(messages[3], "no node")
    pages = asked(prefect_server, "artifacts/filter", artifacts={"key": {"any_": ["mended-burn-ins"]}}, sort="CREATED_DESC")
    assert one_line_mentions(pages[-1]["data"], "cordoned", "burn-in")
    assert "written MB/s" in pages[-1]["data"]
    wait_until(
        lambda: reported_states(prefect_server) >= {("node-1", "healthy"), ("node-0", "quarantined"), ("node-0", "decommissioned")},
        seconds=60,
    )


BLIND = """
from holdfast.flows.node_repair import node_repair
from holdfast.spec import cluster_of

burn_in = {"disk_size": "4MiB", "network_size": "1MiB", "max_memory": "8MiB", "nice": 0}
burn_in["thresholds"] = {"min_disk_bandwidth": 0, "min_network_bandwidth": 0, "max_latency": 0}
node_repair(cluster_of({"name": "no-gpu", "nodes": 2, "burn_in": burn_in}), nodes=["node-0"], seconds=0.05)
"""


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has an NVIDIA device")
def test_a_node_held_for_its_gpu_stays_out_where_no_gpu_can_be_seen(prefect_server: PrefectServer) -> None:
    """Every other check passes; state message, artifact, log and history say why it stays and what to do. A person returns it."""
    place, now = CordonTable(cluster="no-gpu", names=["node-0", "node-1"], rules=Rules()), time.time()
    with closing(History.open(f"sqlite:///{prefect_server.home / 'history.db'}")) as history:
        ecc = CordonedFault(kind="cuda-uncorrectable-ecc")
        word = OperatorRequest(owner=Owner(name="job gpt"), reason="cuda-uncorrectable-ecc: CUDA error", faults=(ecc,), at=now)
        cordons.apply(history, place, "node-0", lambda one, ward: quarantine(one, word, ward), now=now)
        done = subprocess.run(
            [sys.executable, "-c", BLIND], cwd=ROOT, env=prefect_server.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        node = cordons.nodes(history, place, now=time.time())["node-0"]
        assert (node.state, node.cordons[0].faults) == (NodeState.QUARANTINED, (ecc,))
        *_, last = service_moves(history, "no-gpu", "node-0")
        why = "no check could exercise the GPU (no NVIDIA device is visible)"
        assert (last.event, last.reason) == ("untried", why)
        ann = OperatorRequest(owner=Owner(name="ann@desk", person=True), reason="swapped the card", at=time.time())
        cordons.apply(history, place, "node-0", lambda one, _: return_to_service(one, ann), now=time.time())
        assert cordons.nodes(history, place, now=time.time())["node-0"].state is NodeState.HEALTHY

    (run,) = asked(prefect_server, "flow_runs/filter", flow_runs={"name": {"any_": ["repair of no-gpu"]}})
    assert run["state"]["type"] == "COMPLETED"
    assert mentions(run["state"]["message"], "1 node", "1 not proven", "node-0", why)
    (page,) = asked(prefect_server, "artifacts/filter", artifacts={"key": {"any_": ["no-gpu-burn-ins"]}})
    assert one_line_mentions(page["data"], "node-0", "not proven", "quarantined", why)
    assert one_line_mentions(page["data"], "holdfast node return node-0 --reason")
    marks = dict(re.findall(r"^- \*\*(\w+)\*\*: (\w+) after", page["data"], re.MULTILINE))
    assert (marks["gpu"], marks["compute"], marks["disk"], marks["network"]) == ("skipped", "passed", "passed", "passed")


def reported_states(server: PrefectServer) -> set[tuple[str, str]]:
    """Return nodes and the states that events report."""
    names = [f"holdfast.node.service.{state}" for state in ("healthy", "quarantined", "decommissioned")]
    wanted = {"event": {"name": names}, "resource": {"id": [f"holdfast.node.mended.{node}" for node in PLACE.names]}}
    found: list[dict[str, Any]] = asked(server, "events/filter", filter=wanted, limit=50)["events"]
    return {(one["payload"]["node"], one["payload"]["after"]) for one in found}
