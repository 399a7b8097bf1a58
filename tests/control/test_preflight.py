"""What speaks against using a node at a launch: the history, and own checks; a check that fails speaks against no node."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from holdfast.control.nodes.preflight import Preflight
from holdfast.history import History
from holdfast.history.health_samples import save_sweep
from holdfast.policies.nodes.node_health import FRESH, HealthAssessment, HealthFinding, NodeHealthState
from holdfast.spec import LocalCluster, cluster_of
from tests.mentions import mentions
from tests.waiting import wait_until

CLUSTER = LocalCluster(name="c", nodes=4)


def assessed(node: str, status: NodeHealthState, *, ago: float = 0.0) -> HealthAssessment:
    """Return an assessment that is *ago* seconds old."""
    at = time.time() - ago
    finding = HealthFinding(kind="gpu-off-bus", part="gpu 0", quote="Xid 79", since=at, seen=at)
    findings = (finding,) if status is NodeHealthState.UNHEALTHY else ()
    return HealthAssessment(node=node, status=str(status), since=at, at=at, seen=at, findings=findings)


def store(history: History, *assessments: HealthAssessment) -> None:
    """Store these assessments in the history."""
    save_sweep(history, "c", {one.node: one for one in assessments}, [], {})


def test_an_unhealthy_node_comes_last_with_its_reason(history: History) -> None:
    """Others keep their order: a node that is unknown or degraded is not passed over if an agent starts on it."""
    store(
        history,
        assessed("node-0", NodeHealthState.UNHEALTHY),
        assessed("node-1", NodeHealthState.UNKNOWN),
        assessed("node-2", NodeHealthState.DEGRADED),
    )
    preflight = Preflight(CLUSTER, history)
    preflight.remember()
    assert preflight.by_preference(["node-0", "node-1", "node-2", "node-3"]) == ["node-1", "node-2", "node-3", "node-0"]
    assert mentions(preflight.objection("node-0"), "unhealthy", "gpu-off-bus", "Xid 79")
    assert preflight.news(["node-0", "node-1"]) == {preflight.objection("node-0"): ["node-0"]}
    assert preflight.news(["node-0", "node-1"]) == {}, "reported once"


def test_an_old_assessment_does_not_count(history: History) -> None:
    """The node may have changed since."""
    store(history, assessed("node-0", NodeHealthState.UNHEALTHY, ago=FRESH + 60))
    preflight = Preflight(CLUSTER, history)
    preflight.remember()
    assert preflight.objection("node-0") == ""


def test_own_checks_count_as_well(history: History) -> None:
    """They run alongside other work; an old result is refreshed, a new one is not."""
    preflight = Preflight(CLUSTER, history)
    preflight.begin(["node-0"])
    wait_until(lambda: len(preflight._checked) == 4, seconds=60)
    assert preflight._checked["node-0"].status in {"healthy", "degraded", "unhealthy"}
    assert all(bool(preflight.objection(node)) == (one.status == "unhealthy") for node, one in preflight._checked.items())
    before = preflight._checked["node-0"].at
    preflight.begin(["node-0"])
    preflight._check_thread.join()  # type: ignore[union-attr]
    assert preflight._checked["node-0"].at == before
    preflight._checked["node-0"] = dataclasses.replace(preflight._checked["node-0"], at=before - 1000)
    preflight.begin(["node-0"])
    wait_until(lambda: preflight._checked["node-0"].at > before, seconds=60)
    preflight.close()


def test_a_node_that_cannot_be_checked_is_used(history: History) -> None:
    """Nodes over SSH with a port that refuses: all are used as without a check. Waiting for the check ends with it."""
    hosts = [{"name": name, "address": "127.0.0.1", "port": port} for name, port in (("a", 1), ("b", 2))]
    preflight = Preflight(cluster_of({"kind": "ssh", "name": "c", "hosts": hosts, "failure_threshold": 1}), history)
    preflight.begin(["a", "b"])
    preflight.finish()
    wait_until(lambda: len(preflight._checked) == 2, seconds=60)
    assert preflight.by_preference(["a", "b"]) == ["a", "b"]
    assert preflight.objection("a") == ""
    preflight.close()


def test_switched_off_it_checks_nothing(history: History) -> None:
    """Neither the nodes nor the history."""
    store(history, assessed("node-0", NodeHealthState.UNHEALTHY))
    preflight = Preflight(CLUSTER, history, on=False)
    preflight.remember()
    preflight.begin(["node-0"])
    assert preflight._check_thread is None
    assert preflight.by_preference(["node-0", "node-1"]) == ["node-0", "node-1"]


def test_an_unreachable_history_stops_no_launch(tmp_path: Path) -> None:
    """The launch continues without it."""
    away = History.open(f"sqlite:///{tmp_path / 'other.db'}")
    (tmp_path / "other.db").write_bytes(b"no database" * 1000)
    preflight = Preflight(CLUSTER, away)
    preflight.remember()
    assert preflight.objection("node-0") == ""
    away.close()


def a_cluster(folder: Path, disk: int | str, **fields: object) -> LocalCluster:
    """Return a cluster with a short burn-in before a launch, with that minimum speed of disks."""
    limits = {"min_disk_bandwidth": disk, "min_network_bandwidth": 0, "max_latency": 0}
    burn_in = {"before_launch": True, "disk_size": "4MiB", "network_size": "1MiB", "nice": 0, "thresholds": limits, **fields}
    made = cluster_of({"name": "c", "nodes": 2, "directory": str(folder), "burn_in": burn_in})
    assert isinstance(made, LocalCluster)
    return made


def test_a_node_that_fails_the_short_burn_in_comes_last(history: History, tmp_path: Path) -> None:
    """Once it passes nothing speaks against it any more."""
    preflight = Preflight(a_cluster(tmp_path, "1000TB"), history)
    preflight.begin(["node-0"])
    wait_until(lambda: "node-0" in preflight._burn_in_failures, seconds=60)
    assert mentions(preflight.objection("node-0"), "burn-in", "disk") or mentions(preflight.objection("node-0"), "unhealthy")
    assert preflight.by_preference(["node-0", "node-9"]) == ["node-9", "node-0"]
    preflight.finish()
    again = Preflight(a_cluster(tmp_path, 0), history, _burn_in_failures=dict(preflight._burn_in_failures))
    again.begin(["node-0"])
    wait_until(lambda: "node-0" not in again._burn_in_failures, seconds=60)


def test_local_nodes_run_the_short_burn_in_only_if_it_is_configured(history: History) -> None:
    """Over SSH by default."""
    assert not Preflight(CLUSTER, history).has_burn_in
    ssh = cluster_of({"kind": "ssh", "hosts": ["a"]})
    assert Preflight(ssh, history).has_burn_in
    off = cluster_of({"kind": "ssh", "hosts": ["a"], "burn_in": {"before_launch": False}})
    assert not Preflight(off, history).has_burn_in
