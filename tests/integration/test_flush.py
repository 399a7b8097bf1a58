"""Checkpoints that are written out of the nodes' memory, under a real flow: beside training, and when a job ends before its goal."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.history import Checkpoint, queries
from holdfast.host.process import NODE_MARK, mark_of, marked
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint_writer.service import NAME
from tests.integration.stage import Play, Stage
from tests.mentions import mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
COPIES = str(Path(__file__).with_name("copies.py"))
SMALL = ["--heads", "2", "--width", "16", "--context", "16", "--bytes", "50000", "--layers", "2"]
MEMORY = {"when_late": "pause", "max_pause": "10s"}
NODES = {"nnodes": 2, "nproc_per_node": 1}
STEPS = 600
"""Of a job that is ended twice before its goal: many more than it makes until then."""


def checkpoints(play: Play) -> Path:
    """Return the folder of a job's checkpoints."""
    return play.stage.home / "jobs" / play.name / "checkpoints"


def saved(play: Play) -> list[Checkpoint]:
    """Return the checkpoints that were written beside training, as the history has them."""
    return [one for one in queries.checkpoints(play.stage.history, play.job.id) if one.overlapped_s and not one.problem]


def count_of(play: Play, kind: str) -> int:
    """Return how often a problem was reported."""
    return sum(one.problem == kind for one in queries.checkpoints(play.stage.history, play.job.id))


def result(place: Path) -> Any:
    """Return what a job has written at its end."""
    return json.loads(place.read_text())


def writers(stage: Stage) -> list[int]:
    """Return the processes that write checkpoints, on all nodes."""
    marks = [mark_of(stage.nodes.folder(node)) for node in stage.nodes.names()]
    return [pid for mark in marks for pid in marked(NODE_MARK, mark) if _comm_of(pid) == NAME]


def begun(play: Play) -> list[Path]:
    """Return the checkpoints that somebody writes, or wrote and did not finish."""
    return [path for path in checkpoints(play).iterdir() if path not in manifest.candidates(checkpoints(play))]


def _comm_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_shards_become_checkpoints_that_plain_torch_reads_and_a_run_goes_on_from(stage: Stage) -> None:
    """Written by nobody who trains; going on from one leads to the same parameters, to the bit."""
    place = stage.home / "result.json"
    fields: dict[str, Any] = {
        "script": str(EXAMPLES / "fsdp2.py"),
        "args": [*SMALL, "--steps", "40", "--result", str(place)],
        **NODES,
        "checkpoint": {"interval": 10, "memory": MEMORY, "keep": 3},
    }
    play = stage.play("sharded", **fields)
    assert play.ends() == 0, play.log()
    whole, steps = result(place), [one.step for one in saved(play)]
    assert 30 in steps, play.log()
    found = checkpoints(play)
    dcp_to_torch_save(found / "step-00000030", stage.home / "plain.pt")
    plain = torch.load(stage.home / "plain.pt", weights_only=True)
    assert all(value.isfinite().all() for value in plain["model"].values())
    shutil.rmtree(found / "step-00000040")
    place.unlink()
    again = stage.again("sharded", play.spec)
    assert again.ends() == 0, again.log()
    assert queries.steps(stage.history, again.job.id)[0].step == 31
    assert result(place) == whole


def test_a_job_that_ends_before_its_goal_keeps_its_newest_step(stage: Stage, alone: Callable[..., None]) -> None:
    """All its nodes get a preemption notice, by a file; then a person stops it: what the nodes hold is saved each time, and led on from.

    Under torch's own groups nobody votes, and the workers die of the signal.
    """
    notice, results = stage.home / "notice", [stage.home / "whole.json", stage.home / "ended.json"]
    stage.count, stage.cluster = 2, {"preemption_notice": {"file": str(notice), "interval": "200ms", "lead_time": "20s"}}
    fields: dict[str, Any] = {"script": COPIES, **NODES, "groups": "stock", "checkpoint": {"interval": 1000, "memory": MEMORY}}
    alone(COPIES, STEPS, results[0], 0)
    play = stage.play("ends", args=[str(STEPS), str(results[1])], **fields)
    play.steps_to(30)
    notice.write_text("spot instance to be terminated")
    play.ends()
    assert mentions(play.reason(), "every node", "preemption notice")
    step = saved_at_the_end(play)
    notice.unlink()

    again = stage.again("ends", play.spec)
    again.steps_to(step + 20)
    assert queries.generations(stage.history, again.job.id)[-1].resumed_step == step, again.log()
    os.kill(again.process.pid, signal.SIGTERM)
    again.ends()
    assert saved_at_the_end(again) > step
    last = stage.again("ends", play.spec)
    assert last.ends() == 0, last.log()
    assert result(results[0]) == result(results[1])


def saved_at_the_end(play: Play) -> int:
    """See that a job that was cancelled has its newest step on disk, and nothing in memory; return the step."""
    assert play.state() == "CANCELLED", play.log()
    newest = manifest.candidates(checkpoints(play))[0]
    assert manifest.looks_complete(newest)
    step = int(newest.name.removeprefix("step-"))
    assert step >= play.chaos.step() - 1, play.log()
    job_events = [one.text for one in queries.job_events(play.stage.history, play.job.id)]
    assert any(mentions(one, f"step {step}", "memory") for one in job_events), job_events
    assert play.stage.kept() == []
    return step


def test_a_slow_disk_and_a_killed_checkpoint_writer_hold_up_nobody(stage: Stage) -> None:
    """Checkpoints are left out, which is reported once; who is killed over one is replaced, and in the end one stands."""
    limited = {"interval": 5, "bandwidth": "8KB", "memory": MEMORY}
    play = stage.play("slow", script=COPIES, args=["1000000", str(stage.home / "slow.json")], **NODES, checkpoint=limited)
    play.reaches("RUNNING")
    wait_until(lambda: count_of(play, "checkpoint-backlog") > 0, seconds=60, explain=play.log)
    wait_until(lambda: begun(play), seconds=60, explain=play.log)  # so that it is killed over one, and not while it starts
    first = writers(stage)
    assert first
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    before = play.chaos.step()
    wait_until(lambda: set(writers(stage)) - set(first), seconds=60, explain=play.log)
    wait_until(lambda: saved(play), seconds=60, explain=play.log)
    play.steps_to(before + 20)
    assert count_of(play, "checkpoint-backlog") == 1
    assert not play.incidents()
    os.kill(play.process.pid, signal.SIGTERM)
    play.ends()
    assert play.state() == "CANCELLED", play.log()
    assert stage.kept() == []
