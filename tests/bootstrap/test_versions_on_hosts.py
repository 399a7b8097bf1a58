"""Hosts that get another version of Holdfast while a job runs: its controller goes on, and one of the other version is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import __version__
from holdfast.bootstrap import Hosts, NodeWheel, node_wheel
from holdfast.cluster import open_cluster, proxy_client
from holdfast.cluster.remote import RemoteNodes
from holdfast.cluster.ssh import transport
from holdfast.control.agents import client
from holdfast.control.agents.pool import AgentPool
from holdfast.control.backup.standby import BackupPrerequisites
from holdfast.control.supervisor.launch import reasons
from holdfast.control.supervisor.reattach import refuse_another_version
from holdfast.errors import LeaseLost, ProtocolMismatch, VersionMismatch
from holdfast.protocol import PROTOCOL
from holdfast.spec import SshCluster, cluster_of
from tests.bootstrap.wheels import newer
from tests.hosts.fixture import rack_of
from tests.hosts.host import Host
from tests.hosts.rack import Rack
from tests.mentions import mentions
from tests.waiting import wait_until

OTHER = PROTOCOL + 1
NAP = [sys.executable, "-c", "import time; time.sleep(600)"]
HOW = {"warm": False, "python": "", "preload": [], "argv": NAP, "directory": "/", "log_directory": "", "environment": {}}


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Give two hosts."""
    with rack_of(2, tmp_path_factory) as rack:
        yield rack


@pytest.fixture
def cluster(rack: Rack, tmp_path: Path) -> SshCluster:
    """Give a cluster of both hosts, with this version of Holdfast in a fresh folder."""
    made = cluster_of(rack.cluster(directory=f"hf-{tmp_path.name}"))
    assert isinstance(made, SshCluster)
    put(made, node_wheel())
    return made


def put(cluster: SshCluster, wheel: NodeWheel) -> None:
    """Put a Holdfast on both hosts, as `holdfast node bootstrap` does."""
    with Hosts(cluster, wheel) as hosts:
        assert [one.done for one in hosts.set_up(cluster.names)] == ["installed", "installed"]


def agents_of(cluster: SshCluster, epoch: int) -> AgentPool:
    """Return the agents of a controller."""
    plan: dict[str, Any] = {"job": "job", "name": "named", "lease": 60.0, **HOW}
    return AgentPool(open_cluster(cluster), plan, epoch=epoch)


def version_of(host: Host, cluster: SshCluster) -> str:
    """Return the version of the agent that runs on *host*."""
    sign = f"/{cluster.directory}/envs/"
    command = next(command for command in host.processes().values() if sign in command and "-m holdfast.agent --detach" in command)
    return command.partition(sign)[2].partition("-")[0]


def problem_of_a_standby(cluster: SshCluster) -> str:
    """Return what keeps a standby from control_job a job there, once it has tried."""
    standby = BackupPrerequisites()
    for _ in range(2):
        standby.prepare(cluster)
    assert standby._thread is not None
    standby._thread.join(60)
    standby.close()
    return standby.problem


def test_hosts_without_holdfast_are_reported_once_with_the_cure(rack: Rack) -> None:
    """A launch that finds no free node does not report that the job wants too many."""
    raw = cluster_of(rack.cluster(directory="hf-never-set-up"))
    assert isinstance(raw, SshCluster)
    agents = agents_of(raw, 1)
    try:
        assert agents.free() == []
        (reason,) = reasons(agents.unusable_nodes)
    finally:
        agents.close(end=False)
    assert mentions(reason, "n0, n1", "hf-never-set-up/env", "holdfast node bootstrap --cluster CLUSTER_FILE")


@pytest.mark.long
def test_a_controller_keeps_using_its_own_version_when_hosts_get_another(rack: Rack, cluster: SshCluster) -> None:
    """It fences, reconnects and uses further nodes; once another controller of its version has taken over, it can fence no more."""
    agents = agents_of(cluster, 1)
    source = agents.source
    assert isinstance(source, RemoteNodes)
    connected = agents.bring_up("n0")
    put(cluster, newer(OTHER))
    assert (rack[0].home / cluster.directory / "env").readlink().name.startswith("9.9-"), "the other one is in use"
    before = source.node_proxy("n0")
    before.close()
    wait_until(
        lambda: source.node_proxy("n0") is not before and connected.disconnected_since is None and not connected.lost_reason,
        seconds=60,
        explain=lambda: f"{connected.lost_reason}",
    )
    assert connected.send_command("about", protocol=PROTOCOL)["job"] == "job", "the connection came back"
    wait_until(lambda: source.is_reachable("n0"), seconds=60)  # a second look
    agents.bring_up("n1")
    assert [version_of(host, cluster) for host in rack] == [__version__, __version__]
    heir = agents_of(cluster, 2)
    try:
        assert heir.reattach("n0")["job"] == "job"
        for late in (agents.fence, agents.wipe):
            with pytest.raises(LeaseLost, match=r"a newer controller \(epoch 2\)"):
                late("n0")
        assert version_of(rack[0], cluster) == __version__, "its agent lives"
        assert heir.source.fence("n1", "job"), "its agent was ended"
    finally:
        heir.close(end=True)
        agents.close(end=False)


def test_a_controller_of_another_version_is_refused_and_takes_no_node_for_lost(
    rack: Rack, cluster: SshCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hosts did not get its version. The job goes on training; nodes without a job are reported with the other cure."""
    agents = agents_of(cluster, 1)
    agents.bring_up("n0")
    assert problem_of_a_standby(cluster) == ""
    for module in (proxy_client, client, transport):
        monkeypatch.setattr(module, "PROTOCOL", OTHER)
    other = agents_of(cluster, 2)
    try:
        answers = other.each(["n0"], other.reattach)
        with pytest.raises(VersionMismatch) as refused:
            refuse_another_version("gpt", answers)
        for words in (f"speaks protocol {PROTOCOL}, this one {OTHER}", "on n0", "Training continues", "holdfast stop gpt"):
            assert words in str(refused.value)
        with pytest.raises(ProtocolMismatch, match="holdfast node bootstrap"):
            other.source.fence("n1")
        assert version_of(rack[0], cluster) == __version__
        wait_until(lambda: f"speaks protocol {PROTOCOL}, this one {OTHER}" in problem_of_a_standby(cluster), seconds=60)
        monkeypatch.setenv("HOME", str(tmp_path))
        keyless = cluster.model_copy(update={"key": None})
        wait_until(lambda: "there is no key to log in" in problem_of_a_standby(keyless), seconds=60)
    finally:
        other.close(end=False)
        monkeypatch.undo()
        agents.close(end=True)
