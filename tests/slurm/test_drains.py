"""Nodes that are taken out of service, on a real Slurm: drained with a reason where that is permitted, else excluded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster.interface import AllocationRequest
from holdfast.cluster.slurm import commands
from holdfast.cluster.slurm.allocations import Allocations
from holdfast.cluster.slurm.commands import SbatchRequest, run_command
from holdfast.cluster.slurm.drains import Drains
from holdfast.cluster.slurm.parsing import node_states
from holdfast.errors import SlurmUnavailable
from holdfast.spec import SlurmCluster
from tests.mentions import mentions
from tests.slurm.slurm_server import SlurmServer
from tests.waiting import wait_until

CLUSTER = SlurmCluster(kind="slurm", allocation="new")


@pytest.fixture(autouse=True)
def _talks_to_it(slurm: SlurmServer, holdfast_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands go to the Slurm of the tests."""
    assert holdfast_home.is_dir()
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Let what is started be an ordinary user's, as Slurm sees it."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_only_our_own_drains_are_undone(slurm: SlurmServer) -> None:
    """A node that an administrator has drained stays drained."""
    ours, theirs = slurm.names
    slurm.run("scontrol", "update", f"nodename={theirs}", "state=drain", "reason=holdfast is not to have it")
    allocations = Allocations(CLUSTER)
    allocations.begin("j1", "drained", Path("/"))
    try:
        allocations.request(AllocationRequest(excluded={ours: "gpu-off-bus: it fell off the bus", theirs: "ecc"}))
        wait_until(lambda: slurm.state(ours).startswith("drain"), seconds=60, explain=allocations.describe)
        assert slurm.run("sinfo", "-h", "-n", ours, "-o", "%E").endswith("/slurm: gpu-off-bus: it fell off the bus")
        allocations.request(AllocationRequest())
        wait_until(lambda: slurm.state(ours) == "idle", seconds=60, explain=allocations.describe)
        assert slurm.state(theirs).startswith("drain")
        (word,) = [one for one in allocations.states.values() if one.name == theirs]
        assert not Drains(CLUSTER).are_of(word)
    finally:
        allocations.close(end=True)
        slurm.run("scontrol", "update", f"nodename={theirs}", "state=resume")


def test_a_drain_that_slurm_did_not_answer_is_tried_again(slurm: SlurmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node would stay open to other jobs."""
    node, drains = slurm.names[0], Drains(CLUSTER)
    states = node_states(run_command("sinfo", "--json"))
    with monkeypatch.context() as context:
        context.setattr(commands, "COMMAND_SECONDS", 0.001)
        with pytest.raises(SlurmUnavailable):
            list(drains.update({node: "ecc"}, {}, states))
    try:
        (drained,) = drains.update({node: "ecc"}, {}, states)
        assert mentions(drained, node, "drained", "ecc")
    finally:
        slurm.run("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_node_drained_by_another_controller_is_resumed_only_if_it_returned_to_service_since(slurm: SlurmServer) -> None:
    """The other controller may have its own history, or this one's may be unreachable."""
    node, drained = slurm.names[0], time.time()
    assert not Drains(CLUSTER).drain(node, "ecc: it has bad memory")
    wait_until(lambda: slurm.state(node).startswith("drain"), seconds=60, explain=slurm.logs)

    def updated(back: dict[str, float]) -> list[str]:
        return list(Drains(CLUSTER).update({}, back, node_states(run_command("sinfo", "--json"))))

    try:
        assert updated({}) == []
        assert updated({node: drained - 60.0}) == []
        assert slurm.state(node).startswith("drain")
    finally:
        (resumed,) = updated({node: drained + 60.0})
        assert mentions(resumed, node, "resumed")
    wait_until(lambda: slurm.state(node) == "idle", seconds=60, explain=slurm.logs)


def test_where_draining_is_not_permitted_the_node_is_excluded_from_requests(slurm: SlurmServer, nobody: None) -> None:
    """The next allocation does not contain it."""
    node = slurm.names[0]
    states = node_states(run_command("sinfo", "--json"))
    (said,) = Drains(CLUSTER).update({node: "gpu-off-bus"}, {}, states)
    assert mentions(said, node, "excluded", "drain"), said
    assert slurm.state(node) == "idle"
    assert f"--exclude={node}" in SbatchRequest(CLUSTER, "j2", "excluded", Path("/")).command(1, {node})
