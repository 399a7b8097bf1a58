"""Burn-ins over real SSH servers: orders go to both ends of a pair, and what ends with the connection ends."""

from __future__ import annotations

import signal
from pathlib import Path

from holdfast.cluster.ssh import SshBurnInConnections
from holdfast.detectors.nodes.burn_in_results import CheckMark
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.runner import BurnInRunner
from tests.mentions import mentions
from tests.ssh.conftest import Site
from tests.waiting import wait_until

UNLIMITED = {"min_disk_bandwidth": 0, "min_network_bandwidth": 0, "max_latency": 0, "max_clock_offset": "1h"}


def settings(folder: Path) -> dict[str, object]:
    """Return burn-ins that take little, and work in *folder*."""
    small = {"disk_size": "4MiB", "network_size": "1MiB", "max_memory": "8MiB", "torch": False, "nice": 0}
    return {**small, "directory": str(folder), "thresholds": UNLIMITED}


def test_nodes_over_ssh_are_burned_in_and_paired(site: Site, tmp_path: Path) -> None:
    """A node that is off is not judged; the others connect to each other at their own addresses, and no process remains."""
    for name in ("one", "two", "away"):
        site.node(name)
    site.nodes["away"].stop()
    cluster = site.cluster(burn_in=settings(tmp_path))
    with SshBurnInConnections(cluster) as posts:
        assert posts.names() == ["one", "two", "away"]
        found = BurnInRunner(posts, BurnInPlan.of(cluster.burn_in, seconds=0.05)).try_out(["one", "two", "away"])
    assert {node: one.mark for node, one in found.items()} == {"one": CheckMark.PASSED, "two": CheckMark.PASSED, "away": CheckMark.SKIPPED}
    assert "passed with two" in found["one"].checks[-1].words
    assert "Connection refused" in found["away"].reason
    assert list(tmp_path.iterdir()) == [], "the disk is as it was"
    wait_until(lambda: not [*site.nodes["one"].children(), *site.nodes["two"].children()], seconds=60)


def test_a_missing_interpreter_is_reported(site: Site, tmp_path: Path) -> None:
    """With the message of the node's shell."""
    site.node("one")
    cluster = site.cluster(burn_in=settings(tmp_path), python="/no/such/python3")
    with SshBurnInConnections(cluster) as posts:
        found = BurnInRunner(posts, BurnInPlan.of(cluster.burn_in, seconds=0.05)).try_out(["one"])["one"]
    assert found.mark is CheckMark.SKIPPED
    assert "/no/such/python3" in found.reason


def test_a_node_that_fails_during_its_burn_in_is_skipped(site: Site, tmp_path: Path) -> None:
    """Its server is killed while it works: the check has no answer, and the node has not failed."""
    node = site.node("one")
    cluster = site.cluster(burn_in=settings(tmp_path))
    with SshBurnInConnections(cluster) as posts:
        runner = BurnInRunner(
            posts,
            BurnInPlan.of(cluster.burn_in, seconds=0.05),
            on_check=lambda *_: node.signal(signal.SIGKILL) if node.children() else None,
        )
        found = runner.try_out(["one"])["one"]
    assert found.mark is CheckMark.SKIPPED
    assert mentions(found.reason, "exited")
