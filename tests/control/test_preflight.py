"""What speaks against using a node at a launch: the history's last word, and a look of our own; being blind speaks against nobody."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from holdfast.control.nodes.preflight import Preflight
from holdfast.history import History
from holdfast.history.health_samples import keep
from holdfast.spec import LocalCluster, cluster_of
from policies.node_health import FRESH, HealthAssessment, HealthFinding, NodeHealthState
from tests.waiting import wait_until

CLUSTER = LocalCluster(name="c", nodes=4)


def thought(node: str, status: NodeHealthState, *, ago: float = 0.0) -> HealthAssessment:
    """Return a verdict that is *ago* seconds old."""
    at = time.time() - ago
    finding = HealthFinding(kind="gpu-off-bus", part="gpu 0", quote="Xid 79", since=at, seen=at)
    findings = (finding,) if status is NodeHealthState.UNHEALTHY else ()
    return HealthAssessment(node=node, status=str(status), since=at, at=at, seen=at, findings=findings)


def told(history: History, *verdicts: HealthAssessment) -> None:
    """Have the history say this of nodes."""
    keep(history, "c", {one.node: one for one in verdicts}, [], {})


def test_a_sick_node_comes_last_and_says_why(history: History) -> None:
    """Others keep their order: not to be seen, silent, or degraded is no reason to pass a node over that brings an agent up."""
    told(
        history,
        thought("node-0", NodeHealthState.UNHEALTHY),
        thought("node-1", NodeHealthState.UNKNOWN),
        thought("node-2", NodeHealthState.DEGRADED),
    )
    preflight = Preflight(CLUSTER, history)
    preflight.remember()
    assert preflight.by_preference(["node-0", "node-1", "node-2", "node-3"]) == ["node-1", "node-2", "node-3", "node-0"]
    assert preflight.objection("node-0") == "unhealthy: gpu-off-bus: Xid 79"
    assert preflight.news(["node-0", "node-1"]) == {"unhealthy: gpu-off-bus: Xid 79": ["node-0"]}
    assert preflight.news(["node-0", "node-1"]) == {}, "told once"


def test_a_verdict_that_is_old_counts_for_nothing(history: History) -> None:
    """Nobody knows how the node is now."""
    told(history, thought("node-0", NodeHealthState.UNHEALTHY, ago=FRESH + 60))
    preflight = Preflight(CLUSTER, history)
    preflight.remember()
    assert preflight.objection("node-0") == ""


def test_a_look_of_its_own_counts_as_well(history: History) -> None:
    """It takes place beside other work; an old one is repeated, a new one is not."""
    preflight = Preflight(CLUSTER, history)
    preflight.begin(["node-0"])
    wait_until(lambda: len(preflight._told) == 4, seconds=60)
    assert preflight._told["node-0"].status in {"ok", "degraded", "unhealthy"}
    assert all(bool(preflight.objection(node)) == (one.status == "unhealthy") for node, one in preflight._told.items())
    before = preflight._told["node-0"].at
    preflight.begin(["node-0"])
    preflight._thread.join()  # type: ignore[union-attr]
    assert preflight._told["node-0"].at == before
    preflight._told["node-0"] = dataclasses.replace(preflight._told["node-0"], at=before - 1000)
    preflight.begin(["node-0"])
    wait_until(lambda: preflight._told["node-0"].at > before, seconds=60)
    preflight.close()


def test_what_cannot_be_looked_at_stops_nobody(history: History) -> None:
    """Nodes over SSH with a port that refuses: all are used as if nobody had asked. A wait for the look ends with it."""
    hosts = [{"name": name, "address": "127.0.0.1", "port": port} for name, port in (("a", 1), ("b", 2))]
    preflight = Preflight(cluster_of({"kind": "ssh", "name": "c", "hosts": hosts, "misses": 1}), history)
    preflight.begin(["a", "b"])
    preflight.finish()
    wait_until(lambda: len(preflight._told) == 2, seconds=60)
    assert preflight.by_preference(["a", "b"]) == ["a", "b"]
    assert preflight.objection("a") == ""
    preflight.close()


def test_switched_off_it_asks_nobody(history: History) -> None:
    """Neither the nodes nor the history."""
    told(history, thought("node-0", NodeHealthState.UNHEALTHY))
    preflight = Preflight(CLUSTER, history, on=False)
    preflight.remember()
    preflight.begin(["node-0"])
    assert preflight._thread is None
    assert preflight.by_preference(["node-0", "node-1"]) == ["node-0", "node-1"]


def test_a_history_that_is_away_stops_nobody(tmp_path: Path) -> None:
    """The launch goes on without its word."""
    away = History.open(f"sqlite:///{tmp_path / 'other.db'}")
    (tmp_path / "other.db").write_bytes(b"no database" * 1000)
    preflight = Preflight(CLUSTER, away)
    preflight.remember()
    assert preflight.objection("node-0") == ""
    away.close()


def a_cluster(folder: Path, disk: float, **fields: object) -> LocalCluster:
    """Return a cluster whose nodes work for a moment before a launch, with that least speed of disks."""
    limits = {"disk": disk, "network": 0, "latency": 0}
    burn_in = {"before_launch": True, "disk_size": "4MiB", "network_size": "1MiB", "nice": 0, "limits": limits, **fields}
    made = cluster_of({"name": "c", "nodes": 2, "directory": str(folder), "burn_in": burn_in})
    assert isinstance(made, LocalCluster)
    return made


def test_a_node_that_fails_to_work_comes_last(history: History, tmp_path: Path) -> None:
    """By a short burn-in beside the look; once it passes nothing speaks against it any more."""
    preflight = Preflight(a_cluster(tmp_path, 1e9), history)
    preflight.begin(["node-0"])
    wait_until(lambda: "node-0" in preflight._failed, seconds=60)
    assert preflight.objection("node-0").startswith("failed the short burn-in: disk: its disk wrote") or "unhealthy" in preflight.objection(
        "node-0"
    )
    assert preflight.by_preference(["node-0", "node-9"]) == ["node-9", "node-0"]
    preflight.finish()
    again = Preflight(a_cluster(tmp_path, 0), history, _failed=dict(preflight._failed))
    again.begin(["node-0"])
    wait_until(lambda: "node-0" not in again._failed, seconds=60)


def test_nodes_of_this_machine_work_only_if_that_is_asked_for(history: History) -> None:
    """Over SSH by default."""
    assert not Preflight(CLUSTER, history).tries_out
    ssh = cluster_of({"kind": "ssh", "hosts": ["a"]})
    assert Preflight(ssh, history).tries_out
    off = cluster_of({"kind": "ssh", "hosts": ["a"], "burn_in": {"before_launch": False}})
    assert not Preflight(off, history).tries_out
