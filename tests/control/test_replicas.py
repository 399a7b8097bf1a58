"""What agents report about in-memory snapshots is reported to people once, whichever controller runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster.local import LocalNodes
from holdfast.control.agents.events import MemstoreUnavailable, ReplicaLost, ReplicaRestored
from holdfast.control.agents.pool import AgentPool
from holdfast.control.checkpoints.replicas import Replicas
from holdfast.spec.job import MemoryPlan
from tests.mentions import mentions
from tests.waiting import wait_until


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[AgentPool]:
    """Return a pool whose nodes are known and not reached."""
    agents = AgentPool(LocalNodes("here", tmp_path, 3), {"job": "job"}, epoch=1)
    agents.memory = {"node-0": ("127.0.0.1", 1000), "node-1": ("127.0.0.1", 1001)}
    yield agents
    agents.close(end=False)


def test_a_problem_is_reported_once_until_it_is_over(agents: AgentPool) -> None:
    """A replica node is called by its name."""
    replicas, now = Replicas(agents, MemoryPlan()), time.time()
    lost = {"event": "replica.lost", "at": now + 1, "peer": "127.0.0.1:1001", "why": "refused"}
    evidence, words = replicas.note_problem("node-0", ReplicaLost.of(lost))
    assert evidence is not None
    assert (evidence.kind, evidence.node) == ("replica-lost", "node-0")
    assert mentions(evidence.why, "node-1", "refused")
    assert "node-0" in words
    assert replicas.note_problem("node-0", ReplicaLost.of({**lost, "at": now + 2})) == (None, "")
    kept = {"event": "replica.restored", "at": now + 3, "peer": "127.0.0.1:1001"}
    assert mentions(replicas.note_restored("node-0", ReplicaRestored.of(kept)) or "", "node-0", "node-1")
    assert replicas.note_restored("node-0", ReplicaRestored.of({**kept, "at": now + 4})) == ""
    assert replicas.note_problem("node-0", ReplicaLost.of({**lost, "at": now + 5}))[0] is not None


def test_a_recorded_problem_is_not_reported_again(agents: AgentPool) -> None:
    """A controller that reattaches receives the event logs from before its time."""
    replicas, before = Replicas(agents, MemoryPlan()), time.time() - 10
    replicas.remember([("replica-lost", "node-0", before), ("worker-sigkill", "node-1", before)])
    assert replicas.note_problem("node-0", ReplicaLost.of({"event": "replica.lost", "at": before, "peer": "x", "why": "refused"})) == (
        None,
        "",
    )
    assert replicas.note_restored("node-0", ReplicaRestored.of({"event": "replica.restored", "at": before + 1, "peer": "x"})) == ""
    assert (
        replicas.note_problem("node-0", ReplicaLost.of({"event": "replica.lost", "at": before + 2, "peer": "x", "why": "refused"}))[0]
        is not None
    )


def test_nodes_without_a_memory_store_are_all_recorded_and_one_is_reported(agents: AgentPool) -> None:
    """A cluster of containers without /dev/shm is one event."""
    replicas = Replicas(agents, MemoryPlan())
    found = [
        replicas.note_problem(f"node-{number}", MemstoreUnavailable.of({"event": "memstore.unavailable", "at": 1.0, "why": "no /dev/shm"}))
        for number in range(3)
    ]
    assert [evidence.node for evidence, _ in found if evidence is not None] == ["node-0", "node-1", "node-2"]
    assert [bool(words) for _, words in found] == [True, False, False]


def test_workers_get_the_address_of_their_own_server_and_those_of_nodes_without_ranks(agents: AgentPool) -> None:
    """Members exchange theirs; so each of thousands gets no more than each of two."""
    replicas, first, second = Replicas(agents, MemoryPlan()), '"node-0": ["127.0.0.1", 1000]', '"node-1": ["127.0.0.1", 1001]'
    assert replicas.environments({"node-0"}, ["node-0"])["node-0"] == {"HOLDFAST_MEMORY_SERVERS": f"{{{first}, {second}}}"}
    assert replicas.environments({"node-0", "node-1"}, ["node-0"])["node-0"] == {"HOLDFAST_MEMORY_SERVERS": f"{{{first}}}"}
    assert replicas.environments({"node-0"}, [None])[None] == {"HOLDFAST_MEMORY_SERVERS": f"{{{second}}}"}
    agents.memory.clear()
    assert replicas.environments({"node-0"}, ["node-0"])["node-0"] == {}


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentPool]:
    """Return two nodes with agents that have memory stores."""
    folder = tmp_path_factory.mktemp("n")
    how = {"warm": False, "python": sys.executable, "preload": [], "argv": ["true"], "directory": str(folder), "log_directory": str(folder)}
    plan = {"job": "job", "lease": 60.0, **how, "environment": {"HOLDFAST_TOKEN": "secret"}, "memory": {"limit": None}}
    agents = AgentPool(LocalNodes("pair", folder, 2), plan, epoch=1)
    for node in agents.source.names():
        agents.bring_up(node)
    yield agents
    agents.close(end=True)


def test_a_node_without_a_replica_node_is_reported_once_and_gets_the_next_one(pair: AgentPool) -> None:
    """The only other node is lost with the replicas and comes back empty; late reports about it are no news."""
    replicas, (host, port) = Replicas(pair, MemoryPlan()), pair.memory["node-1"]
    assert replicas.maintain(["node-0"]) == []
    wait_until(lambda: pair.clients["node-0"].about()["memory"]["to"] == [[host, port]], seconds=60)
    assert isinstance(pair.source, LocalNodes)
    pair.source.power_off("node-1")
    wait_until(pair.disconnected, seconds=60)
    assert replicas.servers((), [None]) == {None: {"node-0": list(pair.memory["node-0"])}}
    ((evidence, words),) = replicas.maintain(["node-0"])
    assert evidence is not None
    assert (evidence.kind, evidence.node) == ("replica-lost", "node-0")
    assert mentions(words, "node-0", "node-1")
    assert replicas.maintain(["node-0"]) == []
    pair.drop("node-1")
    late = {"event": "replica.lost", "at": time.time(), "peer": f"{host}:{port}", "why": "refused"}
    assert replicas.note_problem("node-0", ReplicaLost.of(late)) == (None, "")
    pair.source.power_on("node-1")
    pair.bring_up("node-1")
    ((evidence, words),) = replicas.maintain(["node-0"])
    assert evidence is None
    assert mentions(words, "node-0", "node-1")
    assert replicas.maintain(["node-0"]) == []
