"""Nodes that an in-process recovery leaves while their agents are unreachable."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster.local import LocalNodes
from holdfast.control.agents import pool as pools
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.reactor import EventQueue
from holdfast.control.recovery import in_process
from holdfast.control.recovery.wait import bring_up_free_nodes, recheck_lost_agents
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.supervise import control_job
from holdfast.history import models, queries
from holdfast.host.process import boot_time, is_alive
from holdfast.policies.recovery.case import Decision, Placement, RecoveryAction
from holdfast.policies.states import Event
from holdfast.spec import LocalCluster, TrainingJob
from tests.control.bare_controller import bare_controller, recorded_events
from tests.waiting import wait_until

MEMBERSHIP = {"node-0": [0], "node-1": [1]}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[LocalNodes]:
    """Return two nodes."""
    nodes = LocalNodes("c", tmp_path, 2)
    yield nodes
    for node in nodes.names():
        nodes.clear(node)


def run_worker(nodes: LocalNodes, job: str) -> int:
    """Have the agent of node 1 run a worker of *job*, as a controller does that is cut off from it then; return its pid."""
    nodes.start_agent("node-1")
    event_queue = EventQueue()
    client = AgentClient("node-1", lambda: nodes.connect("node-1"), event_queue, epoch=1, job=job)
    client.attach()
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    client.send_command("prepare", lease=60.0, warm=False, argv=nap, directory="/", environment={}, log_directory=str(nodes.root / "logs"))
    client.send_command("start", generation=1, membership=MEMBERSHIP, workers=[{"rank": 1, "environment": {}}])
    while (event := event_queue.get(timeout=60)[1])["event"] != "worker.started":  # the machine's own faults may be reported before
        pass
    client.close()
    return int(event["pid"])


def test_a_replaced_rank_on_an_unreachable_node_is_ended_once_the_node_answers(holdfast_home: Path, nodes: LocalNodes) -> None:
    """Otherwise it would keep the process, and the memory of its device, as long as the job runs."""
    assert holdfast_home.is_dir()
    spec = TrainingJob.model_validate({"name": "taken", "command": ["true"], "preflight": False, "nnodes": 2})
    with control_job(spec, LocalCluster(name="c", nodes=2, directory=str(nodes.root))) as run:
        assert isinstance(run, JobController)
        run.generations.enter(1, dict(MEMBERSHIP), rank_table=RankTable.fresh(1, MEMBERSHIP, ("127.0.0.1", 1), every=None), reason="launch")
        run.generations.sent_to["node-1"] = 1
        pid = run_worker(nodes, run.job.id)
        now = time.time()
        row = models.Incident(
            job_id=run.job.id, number=1, kind="job-hang", target="rank 1", fault_at=now, detected_at=now, generation_before=1, reason="x"
        )
        incident = IncidentInWork(row=row, lap_at=now, state=run.generations.state)
        seat = Placement(rank=1, node="node-0", hot_spare=7)
        incident.decision = Decision(action=RecoveryAction.REPLACE_RANKS, reason="rank 1 continues in hot spare 7 on node-0", seats=(seat,))
        assert in_process.isolate(run, incident, incident.decision).event is Event.ISOLATED
        wait_until(lambda: not is_alive(pid, None), seconds=60)
        assert incident.lost == {"node-1"}
        assert "node-1" not in run.generations.sent_to


@pytest.mark.parametrize("confirmed", [True, False], ids=["confirmed", "unconfirmed"])
def test_a_node_is_not_lost_because_the_lease_of_its_waiting_job_is_unconfirmed(
    tmp_path: Path, nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch, *, confirmed: bool
) -> None:
    """It is used again once the controller knows that it may act; with a confirmed lease it gets another agent at once."""
    monkeypatch.setattr(pools, "CONFIRM_SECONDS", 0.0)
    cluster = LocalCluster(name="c", nodes=2, directory=str(nodes.root))
    with bare_controller(tmp_path, MEMBERSHIP, cluster=cluster, preflight=False) as run:
        agent = run.agents.bring_up("node-1")
        known_until, run.agents.lease_until = run.agents.lease_until, lambda: boot_time() + 3600.0 if confirmed else 0.0
        assert nodes.fence("node-1"), "its agent is killed"
        wait_until(lambda: agent.lost_reason is not None, seconds=60)
        now = time.time()
        row = models.Incident(
            job_id=run.job.id, number=1, kind="node-lost", target="node-1", fault_at=now, detected_at=now, generation_before=1, reason="x"
        )
        incident = run.incidents.current = IncidentInWork(row=row, lap_at=now, state=run.generations.state)
        recheck_lost_agents(run, incident)
        assert ("node-1" in run.agents.alive()) == confirmed
        assert incident.lost == set()
        assert any("lease" in text for text in recorded_events(run)) != confirmed
        assert "node-1" not in queries.node_statuses(run.history, "c")
        run.agents.lease_until = known_until
        bring_up_free_nodes(run, missing=2)
        assert "node-1" in run.agents.alive()
