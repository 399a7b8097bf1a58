"""Which nodes are free, and waiting for them: real local nodes, real SSH servers, real cordons in the history."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from holdfast.cluster.local import LocalNodes
from holdfast.errors import AllocationRequired, CapacityTimeout, NotEnoughNodes
from holdfast.history import History, cordons
from holdfast.history.cordons import CordonTable
from holdfast.policies.nodes.cordons import OperatorRequest, Owner, Rules
from holdfast.policies.nodes.quarantine import quarantine, return_to_service
from holdfast.probe.health.capacity import open_capacity_check, wait_for
from holdfast.spec import LocalCluster, cluster_of
from tests.mentions import mentions
from tests.ssh.conftest import Site

SMALL = LocalCluster(name="small", nodes=3)
PLACE = CordonTable(cluster="small", names=SMALL.names, rules=Rules(max_unavailable=1.0))


def word(reason: str) -> OperatorRequest:
    """Return a word of a person now."""
    return OperatorRequest(owner=Owner(name="ann@desk", person=True), reason=reason, at=time.time())


def quarantined(history: History, node: str) -> None:
    """Have a node quarantined."""
    cordons.apply(history, PLACE, node, lambda one, ward: quarantine(one, word("Xid 79"), ward), now=time.time())


def test_nodes_that_are_quarantined_or_do_not_answer_are_not_free(history: History) -> None:
    """Each is named with its reason; the ones that are left are free."""
    quarantined(history, "node-1")
    LocalNodes.of(SMALL).power_off("node-2")
    with open_capacity_check(SMALL) as check:
        found = check.now()
    assert found.free == ("node-0",)
    assert mentions(found.unavailable["node-1"], "quarantined", "ann@desk", "cordon 1", "Xid 79")
    assert found.unavailable["node-2"].startswith("unreachable: ")
    assert mentions(found.unavailable["node-2"], "switched off")


def test_a_wait_ends_as_soon_as_a_node_comes_back(history: History) -> None:
    """A line says what is waited for, once for each change; the node comes back while that line is written."""
    quarantined(history, "node-1")
    LocalNodes.of(SMALL).power_off("node-2")
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        cordons.apply(history, PLACE, "node-1", lambda one, _: return_to_service(one, word("new GPU")), now=time.time())

    with open_capacity_check(SMALL) as check:
        found = wait_for(check, 2, timeout_seconds=60, poll_seconds=0.05, report=report)
    assert found.free == ("node-0", "node-1")
    assert len(lines) == 1
    assert mentions(lines[0], "cluster 'small'", "1 of 2", "node-1", "quarantined")


def test_a_wait_that_takes_too_long_says_what_each_node_lacks(history: History) -> None:
    """In one sentence, with numbers."""
    quarantined(history, "node-1")
    LocalNodes.of(SMALL).power_off("node-2")
    with open_capacity_check(SMALL) as check, pytest.raises(CapacityTimeout) as raised:
        wait_for(check, 2, timeout_seconds=0.2, poll_seconds=0.05)
    assert (raised.value.cluster, raised.value.wanted) == ("small", 2)
    assert mentions(str(raised.value), "200 ms", 1, "node-1", "quarantined")
    assert "node-2: unreachable: " in str(raised.value)


def test_more_nodes_than_the_cluster_has_are_refused_at_once(history: History) -> None:
    """No wait could ever end; a local cluster's nodes have no labels either."""
    with open_capacity_check(SMALL) as check, pytest.raises(NotEnoughNodes) as few:
        wait_for(check, 4, timeout_seconds=600, poll_seconds=1)
    assert (few.value.wanted, few.value.cluster) == (4, "small")
    assert mentions(few.value.detail, 3)
    with open_capacity_check(SMALL, {"gpu": "h200"}) as check, pytest.raises(NotEnoughNodes) as few:
        wait_for(check, 1, timeout_seconds=600, poll_seconds=1)
    assert (few.value.wanted, few.value.cluster) == (1, "small")
    assert mentions(few.value.detail, 0, "labels")


def test_a_slurm_cluster_is_refused_in_words() -> None:
    """Its own queue waits."""
    cluster = cluster_of({"kind": "slurm", "name": "hpc"})
    with pytest.raises(AllocationRequired) as refused, open_capacity_check(cluster):
        pytest.fail("nothing to wait for")
    assert refused.value.cluster == "hpc"


def test_a_machine_without_holdfast_or_without_an_answer_is_not_free(site: Site, history: History, tmp_path: Path) -> None:
    """Over SSH a machine is free when it answers and Holdfast is set up there; the reason of each other one names the cure."""
    site.node("up", "SetEnv HOLDFAST_KERNEL_LOG=/dev/null")  # the machine's own has what other tests did to it
    site.node("down").stop()
    cluster = site.cluster(name="racked", failure_threshold=1, directory=str(tmp_path))
    with open_capacity_check(cluster) as check:
        assert mentions(check.now().unavailable["up"], "holdfast node bootstrap --cluster CLUSTER_FILE")
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with open_capacity_check(cluster) as check:
        found = check.now()
    assert found.free == ("up",), found.reasons
    assert "Connection refused" in found.unavailable["down"]
