"""A hardware error that a script reports: the node gets no second rank, the job goes on without it or waits, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import approvals, cordons, queries
from tests.integration.stage import BOOTED, ENDLESS, Play, Stage
from tests.mentions import mentions
from tests.monitors import is_read
from tests.waiting import wait_until

pytestmark = pytest.mark.long

ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
EACH = f"if node == 'node-0' and step == 5: raise RuntimeError({ECC!r})"


def generations_on(play: Play, node: str) -> list[int]:
    """Return the generations that had ranks on *node*."""
    return [one.number for one in queries.generations(play.stage.history, play.job.id) if node in one.ranks]


def faults_of(stage: Stage, node: str) -> list[dict[str, Any]]:
    """Return what *node* is quarantined for."""
    return [fault for one in cordons.history_of(stage.history, "stage", node) for fault in one.faults]


def test_an_ecc_error_takes_the_node_out_and_the_job_goes_on_with_fewer(stage: Stage) -> None:
    """Without a spare the job shrinks at once: one generation ran on the bad node, and a burn-in will have to exercise its GPU."""
    stage.count = 2
    play = stage.play("ecc", args=["--steps", "12", "--each", EACH], nnodes="1:2", nproc_per_node=1)
    assert play.ends() == 0, play.log()
    (incident,) = play.incidents()
    assert (incident.kind, incident.target, incident.action) == ("cuda-uncorrectable-ecc", "rank 0 on node-0", "shrink-restart")
    assert mentions(incident.reason, "GPU reset", "node-0")
    assert generations_on(play, "node-0") == [1]
    assert faults_of(stage, "node-0") == [{"kind": "cuda-uncorrectable-ecc", "device": ""}]


def test_an_ecc_error_on_the_only_node_makes_the_job_wait_and_say_why(stage: Stage) -> None:
    """It is not started again on that node, and gives the operator both ways out."""
    stage.count, stage.cluster = 1, {"quarantine": {"approval_timeout": "0s"}}
    play = stage.play("ecc-alone", args=["--steps", "12", "--each", EACH], nnodes=1, nproc_per_node=1)
    play.reaches("WAITING")
    wait_until(lambda: faults_of(stage, "node-0"), seconds=60, explain=play.log)
    assert mentions(play.reason(), "job ecc-alone")  # taken out, or quarantined already: the hold is written beside the recovery
    assert mentions(play.reason(), "holdfast node return node-0")
    assert generations_on(play, "node-0") == [1]
    assert play.kinds() == ["cuda-uncorrectable-ecc"]
    play.stops()


def test_a_node_that_a_person_keeps_is_started_on_again_and_not_quarantined(stage: Stage) -> None:
    """By default a person is asked before the only node is taken out; a refusal is a decision, and on record as the reason."""
    stage.count = 1
    each = EACH.replace("step == 5", "step == 5 and generation == 1")
    play = stage.play("ecc-kept", args=["--steps", "12", "--each", each], nnodes=1, nproc_per_node=1)
    wait_until(lambda: approvals.pending_approvals(stage.history), seconds=60, explain=play.log)
    (asked,) = approvals.pending_approvals(stage.history)
    command = [sys.executable, "-m", "holdfast", "node", "approve", str(asked.number), "--deny", "--reason", "a test pattern"]
    subprocess.run(command, env=stage.environment, capture_output=True, check=True)
    assert play.ends() == 0, play.log()
    (incident,) = play.incidents()
    assert (incident.action, incident.outcome) == ("restart-workers", "recovered")
    assert mentions(incident.reason, "person", "node-0")
    assert (generations_on(play, "node-0"), faults_of(stage, "node-0")) == ([1, 2], [])


def test_a_gpu_that_can_do_no_more_work_is_left_at_once_though_the_job_still_steps(stage: Stage, tmp_path: Path) -> None:
    """The kernel's line and the rank on that GPU are two signs; without a rank on it the line is reported, and nothing is done."""
    log = tmp_path / "kern.log"
    log.write_text(BOOTED)
    stage.environment["HOLDFAST_KERNEL_LOG"] = str(log)
    play = stage.play("gsp", args=ENDLESS, nnodes=2, nproc_per_node=1, spare_nodes=1)
    play.steps_to(4)
    wait_until(lambda: is_read(log, "node-0") and is_read(log, "node-1"), seconds=60, explain=play.log)
    other = "NVRM: Xid (PCI:0000:3b:00): 119, pid=1, name=init, Timeout after 6s of waiting for RPC response from GPU1 GSP!"
    with log.open("a") as file:
        file.write(f"Nov 21 09:10:00 n0 kernel: {other}\n")
    wait_until(lambda: queries.newest_fault(stage.history, play.job.id, ["gpu-gsp-timeout"]), seconds=60, explain=play.log)
    assert (play.state(), play.incidents()) == ("RUNNING", [])
    line = f"NVRM: Xid (PCI:0000:18:00): 79, pid={play.pids()[1]}, name=python, GPU has fallen off the bus."
    with log.open("a") as file:
        file.write(f"Nov 21 09:10:05 n0 kernel: {line}\n")
    wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=60, explain=play.log)
    (incident,) = play.incidents()
    assert (incident.kind, incident.target, incident.action, incident.outcome) == (
        "gpu-off-bus", "rank 1 on node-1", "replace-node", "recovered",
    )  # fmt: skip
    assert generations_on(play, "node-1") == [1]
    assert play.finishes() == 0, play.log()
