"""A node that a fault of its own takes out of a job is not taken back by this job or the next one; a person's word brings it back."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import FaultRecord, approvals, cordons, queries
from holdfast.history.health_samples import save_sweep
from holdfast.history.models import ApprovalRequest
from holdfast.policies.nodes.node_health import HealthAssessment, HealthFinding
from tests.history.rows import service_moves
from tests.integration.prefect_api import ask
from tests.integration.stage import BOOTED, ENDLESS, Play, Stage
from tests.mentions import mentions, one_line_mentions
from tests.monitors import is_read
from tests.waiting import wait_until

pytestmark = pytest.mark.long

OFF_BUS = "Nov 21 10:00:01 n0 kernel: NVRM: Xid (PCI:0000:18:00): 79, pid=42, GPU has fallen off the bus.\n"
CLUSTER = "name: stage\nnodes: 1\n"


def say(stage: Stage, tmp_path: Path, *words: str) -> str:
    """Say a person's word about a node of the stage, as a person would; return what the command said."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    command = [sys.executable, "-m", "holdfast", "node", *words, "--cluster", str(tmp_path / "cluster.yaml")]
    return subprocess.run(command, env=stage.environment, capture_output=True, text=True, check=True).stdout


def call(stage: Stage, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask the Prefect server, as its UI does; return the answer."""
    return dict(ask(f"{stage.environment['PREFECT_API_URL']}/{path}", body))


def run_of(stage: Stage, asked: ApprovalRequest) -> dict[str, Any]:
    """Return the flow run in which a question is asked."""
    return call(stage, f"flow_runs/{asked.flow_run}")


def job_events(play: Play) -> str:
    """Return all that was remarked of the job."""
    return "\n".join(one.text for one in queries.job_events(play.stage.history, play.job.id))


def off_bus(play: Play) -> list[FaultRecord]:
    """Return what the history has of a GPU that is gone."""
    return [one for one in queries.faults(play.stage.history, play.job.id) if one.kind == "gpu-off-bus"]


def off_the_bus(stage: Stage, tmp_path: Path, name: str) -> Play:
    """Have the GPU of a job's only node fall off the bus, and its rank die for it; wait until a person is asked."""
    log = tmp_path / "kern.log"
    log.write_text(BOOTED)
    stage.environment["HOLDFAST_KERNEL_LOG"] = str(log)
    stage.count = 1
    each = "if generation == 1 and step == 5: time.sleep(3600)"
    play = stage.play(name, args=["--steps", "20", "--each", each], nnodes=1, nproc_per_node=1, timeouts={"hang_min": "1h"})
    play.steps_to(4)
    wait_until(lambda: is_read(log, "node-0"), seconds=60, explain=play.log)
    with log.open("a") as file:
        file.write(OFF_BUS)
    wait_until(lambda: off_bus(play), seconds=60, explain=play.log)
    (fault,) = off_bus(play)
    assert (fault.node, fault.recommended_action, fault.evidence["source"], fault.incident_id) == (
        "node-0",
        "evict",
        "kernel log on node-0",
        None,
    )
    assert one_line_mentions(job_events(play), "fallen off the bus")
    assert (play.state(), play.incidents()) == ("RUNNING", []), "by itself it stops nothing"
    play.chaos.kill(0)
    play.reaches("WAITING")
    assert mentions(play.reason(), "0 nodes", 1, "approval")
    wait_until(
        lambda: [one.flow_run for one in approvals.pending_approvals(stage.history)] not in ([], [None]), seconds=60, explain=play.log
    )
    return play


def test_a_node_with_a_fault_of_its_own_stays_out_until_a_person_takes_it_back(stage: Stage, tmp_path: Path) -> None:
    """A person lets it go, as the job has no other: the job waits for capacity though the agent would answer, and says why."""
    play = off_the_bus(stage, tmp_path, "off-bus")
    (asked,) = approvals.pending_approvals(stage.history)
    command = [sys.executable, "-m", "holdfast", "node", "approve", str(asked.number), "--reason", "swap it"]
    said = subprocess.run(command, env=stage.environment, capture_output=True, text=True, check=True).stdout
    assert re.match(rf"approval {asked.number} of job off-bus .*\bisolate node-0 by \S+@\S+: swap it\n", said)
    wait_until(lambda: re.search(r"node-0 is (taken out|quarantined) by job off-bus", play.reason()), seconds=60, explain=play.log)
    assert play.state() == "WAITING"
    wait_until(
        lambda: [one.event for one in service_moves(stage.history, "stage", "node-0")] == ["quarantined"], seconds=60, explain=play.log
    )
    (opened,) = cordons.history_of(stage.history, "stage", "node-0")
    assert (opened.owner, opened.person, opened.ended_at) == ("job off-bus", False, None)
    assert "fallen off the bus" in opened.evidence[0]
    assert "(approved by " in opened.reason
    wait_until(lambda: run_of(stage, asked)["state"]["type"] == "COMPLETED", seconds=60, explain=play.log)
    assert "isolate node-0 by " in run_of(stage, asked)["state"]["message"]

    other = stage.play("next", args=["--steps", "5"], nnodes=1, nproc_per_node=1)
    assert other.ends() == 1, other.log()
    assert mentions(other.reason(), "node-0", "quarantined", "job off-bus", "cordon 1", "gpu-off-bus")
    assert mentions(other.reason(), "holdfast node return node-0 --reason")
    assert play.state() == "WAITING", "the node answers all the time, and is not taken"

    assert "quarantined -> healthy" in say(stage, tmp_path, "return", "node-0", "--reason", "GPU reseated")
    assert play.ends() == 0, play.log()
    assert list(queries.generations(stage.history, play.job.id)[-1].ranks) == ["node-0"]
    assert [(one.action, one.outcome) for one in play.incidents()] == [("wait-for-capacity", "recovered")]


def test_a_form_in_prefects_ui_keeps_a_node_that_a_person_trusts(stage: Stage, tmp_path: Path) -> None:
    """The paused run shows what is asked; refused there, the rank is started again where it was, and nothing is held against the node."""
    play = off_the_bus(stage, tmp_path, "trusted")
    (asked,) = approvals.pending_approvals(stage.history)
    run = run_of(stage, asked)
    assert (run["name"], run["state"]["type"]) == ("trusted: may node-0 be isolated?", "PAUSED")
    wrong = call(stage, f"flow_runs/{asked.flow_run}/resume", {"run_input": {"answer": "approve", "nodes": ["node-7"]}})
    assert wrong["status"] == "REJECT", "the form is typed"
    form = {"answer": "deny", "nodes": ["node-0"], "by": "ann", "reason": "known bad sensor"}
    assert call(stage, f"flow_runs/{asked.flow_run}/resume", {"run_input": form})["status"] == "ACCEPT"
    assert play.ends() == 0, play.log()
    assert [(one.action, one.outcome) for one in play.incidents()] == [("restart-workers", "recovered")]
    assert one_line_mentions(job_events(play), "answered", "keep node-0", "ann", "known bad sensor")
    assert service_moves(stage.history, "stage", "node-0") == []
    assert mentions(run_of(stage, asked)["state"]["message"], "keep node-0", "ann", "known bad sensor")


def standings(stage: Stage) -> dict[str, str]:
    """Return where the nodes stand that a job has taken."""
    return {node: move.status for node, move in queries.node_statuses(stage.history, "stage").items()}


def test_a_node_that_is_held_or_sick_is_given_to_no_job(stage: Stage, tmp_path: Path) -> None:
    """The launch takes others, also a spare one, and says who cordoned one and why, and what the cluster-health flow left of the other."""
    stage.count, now = 4, time.time()
    finding = HealthFinding(kind="gpu-off-bus", part="gpu 0", quote="GPU 0: Xid 79", since=now, seen=now)
    unhealthy = HealthAssessment(node="node-1", status="unhealthy", since=now, at=now, seen=now, findings=(finding,))
    save_sweep(stage.history, "stage", {"node-1": unhealthy}, [], {})
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    said = say(stage, tmp_path, "cordon", "node-0", "--reason", "new fan", "--for", "2h")
    assert "healthy -> cordoned (cordon 1" in said

    play = stage.play("beside", args=ENDLESS, nnodes=1, nproc_per_node=1, spare_nodes=1)
    wait_until(lambda: standings(stage) == {"node-2": "healthy", "node-3": "healthy"}, seconds=60, explain=play.log)
    play.steps_to(1)
    play.stops()
    (generation,) = queries.generations(stage.history, play.job.id)
    assert list(generation.ranks) == ["node-2"]
    assert standings(stage) == {"node-2": "healthy", "node-3": "healthy"}
    assert one_line_mentions(job_events(play), "node-0", "left out", "cordoned")
    assert one_line_mentions(job_events(play), "new fan", "holdfast node uncordon node-0 --reason")
    assert one_line_mentions(job_events(play), "node-1", "unhealthy", "gpu-off-bus", "GPU 0", "Xid 79")
