"""`holdfast node burn-in`: its output, its effect on isolated nodes, and every way in which it is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.local import LocalNodes
from holdfast.history import History, cordons
from holdfast.history.cordons import CordonTable
from holdfast.history.models import Job
from holdfast.paths import cluster_directory
from holdfast.policies.nodes.cordons import Node, OperatorRequest, Owner, Rules
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.nodes.quarantine import begin_burn_in, quarantine
from holdfast.probe.burn_in.runner import BurnInRunner
from holdfast.spec import LocalCluster
from tests.cli.conftest import Command
from tests.history.rows import service_moves
from tests.mentions import mentions, one_line_mentions

SMALL = (
    "{disk_size: 4MiB, network_size: 1MiB, max_memory: 8MiB, torch: false, nice: 0, "
    "thresholds: {min_disk_bandwidth: LIMIT, min_network_bandwidth: 0, max_latency: 0}}"
)
PLACE = CordonTable(cluster="small", names=["node-0", "node-1"], rules=Rules())
OF_SMALL = ("--cluster", "cluster.yaml")
QUICK = (*OF_SMALL, "--for", "50ms")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write the file of a cluster of two nodes that are tried in next to no time."""
    path = tmp_path / "cluster.yaml"
    path.write_text(f"name: small\nnodes: 2\nburn_in: {SMALL.replace('LIMIT', '0')}\n")
    return path


def out(history: History, node: str = "node-1") -> None:
    """Have a job quarantine a node."""
    now = time.time()
    word = OperatorRequest(owner=Owner(name="job gpt"), reason="gpu-off-bus: Xid 79", at=now)
    cordons.apply(history, PLACE, node, lambda one, ward: quarantine(one, word, ward), now=now)


def now_of(history: History, node: str = "node-1") -> Node:
    """Return the node as it is."""
    return cordons.nodes(history, PLACE, now=time.time()).get(node, Node(name=node))


def test_a_quarantined_node_that_passes_returns_to_service(here: Command, book: History, small: Path) -> None:
    """A line for each check with its figures, and the result last."""
    out(book)
    done = here("node", "burn-in", "node-1", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, _, last = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["node-1", name, "passed"] for name in ("compute", "memory", "disk", "clock", "network")
    ]
    assert "written MB/s" in lines[2]
    assert mentions(last, "node-1", "compute", "memory", "disk", "clock", "network", NodeState.IN_BURN_IN, NodeState.HEALTHY)
    assert now_of(book).state is NodeState.HEALTHY
    assert [one.event for one in service_moves(book, "small", "node-1")] == ["quarantined", "tested", "passed"]


def test_a_node_that_fails_stays_quarantined_with_the_evidence(here: Command, book: History, small: Path) -> None:
    """Its reason is kept; the status is 1."""
    small.write_text(small.read_text().replace("min_disk_bandwidth: 0", "min_disk_bandwidth: 1000TB"))
    out(book)
    done = here("node", "burn-in", "node-1", *QUICK)
    assert done.returncode == 1
    assert mentions(done.stdout.splitlines()[-1], "node-1", "failed", "disk")
    node = now_of(book)
    assert node.state is NodeState.QUARANTINED
    assert not node.is_due(time.time()), "the next try is later"
    assert mentions(service_moves(book, "small", "node-1")[-1].reason, "disk", "MB/s")


def test_a_short_burn_in_lifts_nothing_and_runs_during_training(
    here: Command, book: History, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one is refused where a job trains, with both cures."""
    out(book)
    a_job_trains(book, monkeypatch)
    refused = here("node", "burn-in", "node-1", *QUICK)
    assert refused.returncode == 2
    assert mentions(refused.stderr, "'gpt'", "node-1", "`holdfast node migrate gpt --from node-1`", "`--short`")
    assert len(service_moves(book, "small", "node-1")) == 1
    done = here("node", "burn-in", "node-1", "--short", *OF_SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mentions(done.stderr, NodeState.QUARANTINED, "short")
    assert now_of(book).state is NodeState.QUARANTINED


def a_job_trains(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an agent of a job live on node-1, as its folder says: this process."""
    with history.session() as session:
        session.add(Job(id="j1", name="gpt", spec={}, cluster={}, directory="", at=0.0))
    folder = cluster_directory("small") / "node-1"
    folder.mkdir(parents=True)
    monkeypatch.setattr("holdfast.agent.node.directory.is_alive", lambda *_: True)
    (folder / "agent.json").write_text(json.dumps({"pid": 1, "job": "j1", "started": 0}))


def test_programs_get_every_figure(here: Command, book: History, small: Path) -> None:
    """Also for a node without cordons; it stays healthy."""
    output = json.loads(here("node", "burn-in", "node-0", "--json", *QUICK).stdout)
    (node,) = output["nodes"]
    assert (node["node"], node["outcome"], node["state"], node["for_a_hold"]) == ("node-0", "passed", "healthy", False)
    disk: dict[str, Any] = next(one for one in node["checks"] if one["name"] == "disk")
    assert disk["mark"] == "passed"
    assert disk["figures"]["written MB/s"] > 0
    assert service_moves(book, "small", "node-0") == []


def test_a_healthy_node_that_fails_is_not_cordoned(here: Command, book: History, small: Path) -> None:
    """With the command that takes it out."""
    small.write_text(small.read_text().replace("min_disk_bandwidth: 0", "min_disk_bandwidth: 1000TB"))
    done = here("node", "burn-in", "node-0", *QUICK)
    assert done.returncode == 1
    assert "`holdfast node cordon node-0 --reason" in done.stderr
    assert now_of(book, "node-0").state is NodeState.HEALTHY


def test_a_node_that_cannot_be_tested_is_unchanged(here: Command, book: History, small: Path) -> None:
    """Nothing counts against it."""
    out(book)
    LocalNodes("small", cluster_directory("small"), 2).power_off("node-1")
    done = here("node", "burn-in", "node-1", *QUICK)
    assert done.returncode == 1
    assert one_line_mentions(done.stdout, "node-1", "not proven", "reach")
    assert service_moves(book, "small", "node-1")[-1].event == "untried"


def test_one_burn_in_at_a_time(here: Command, book: History, small: Path) -> None:
    """The other one continues."""
    out(book)
    now = time.time()
    word = OperatorRequest(owner=Owner(name="node-repair"), reason="due", at=now)
    cordons.apply(book, PLACE, "node-1", lambda one, _: begin_burn_in(one, word, 1, seconds=600), now=now)
    done = here("node", "burn-in", "node-1", *QUICK)
    assert done.returncode == 2
    assert mentions(done.stderr, "burn-in 2", "node-1")
    assert now_of(book).state is NodeState.IN_BURN_IN


def test_an_interrupted_burn_in_leaves_nothing_open(here: Command, book: History, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle: the node can be tried again, and nothing counts against it."""
    out(book)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BurnInRunner, "_check_node", interrupted)
    assert here("node", "burn-in", "node-1", *QUICK).returncode == 130
    last = service_moves(book, "small", "node-1")[-1]
    assert (last.event, last.reason) == ("untried", "the burn-in was aborted")


REFUSED = {
    "a node that is not there": (("nod-1",), "has no node 'nod-1'. It has nodes such as node-1"),
    "no time": (("node-1", "--for", "0s"), "not a duration above zero"),
    "no node": ((), "Missing argument 'NODE...'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_nodes_are_reported(case: str, here: Command, small: Path) -> None:
    """Status 2, and nothing is tried."""
    arguments, words = REFUSED[case]
    done = here("node", "burn-in", *arguments, *OF_SMALL)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_invalid_settings_are_reported_with_their_field(here: Command, small: Path) -> None:
    """As every other field of a cluster."""
    small.write_text("burn_in: {memory: 200%, thresholds: {min_disk_bandwidth: -1}, nice: 40}\n")
    done = here("node", "burn-in", "node-1", *OF_SMALL)
    assert done.returncode == 2
    for field in ("burn_in.memory", "burn_in.thresholds.min_disk_bandwidth", "burn_in.nice"):
        assert field in done.stderr


def test_every_setting_has_a_default_that_is_itself_allowed() -> None:
    """A cluster may write its settings down as they are."""
    assert LocalCluster.model_validate(LocalCluster().model_dump(mode="json")) == LocalCluster()
