"""State in the nodes' memory under a real flow: a node is lost, everybody is killed at once, and no checkpoint was ever written."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import Snapshots, queries
from tests.integration.stage import Play, Stage
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--heads", "2", "--width", "16", "--context", "16", "--bytes", "50000", "--layers", "2"]
ALWAYS = {"every": 0, "memory": {"policy": "pause", "pause": "10s"}}
"""No checkpoint on disk, and a snapshot at every step, whatever a busy machine makes of the idle time."""


def begun(stage: Stage, name: str, steps: int, script: str, **fields: Any) -> Play:
    """Start an example of two ranks on two nodes."""
    result = stage.home / f"{name}.json"
    args = [*SMALL, "--steps", str(steps), "--result", str(result)]
    nodes = {"wanted": 2, "ranks": 1, "spare": 1, "standbys": 0}
    return stage.play(name, script=str(EXAMPLES / script), args=args, nodes=nodes, checkpoint=ALWAYS, **fields)


def result(stage: Stage, name: str) -> dict[str, Any]:
    """Return what a job has written at its end."""
    found: dict[str, Any] = json.loads((stage.home / f"{name}.json").read_text())
    return found


def lost(play: Play) -> int:
    """Return the steps that were computed again for the newest incident."""
    one = play.incidents()[-1]
    assert one.outcome == "recovered", play.log()
    assert one.steps_lost is not None
    return one.steps_lost


def kill_all(play: Play) -> None:
    """Kill every worker at once."""
    for pid in play.pids().values():
        with suppress(ProcessLookupError):  # the flow may have ended it meanwhile
            os.kill(pid, signal.SIGKILL)


def replicated(play: Play) -> Snapshots | None:
    """Return what a generation after the first has on record of its snapshots, once other nodes are known to have replicas of all ranks."""
    row = queries.newest_snapshots(play.stage.history, play.job.id)
    return row if row is not None and row.generation > 1 and row.replica_step is not None else None


@pytest.mark.timeout(240)  # two runs of an example
def test_a_lost_node_and_then_all_at_once_cost_a_step_each(stage: Stage) -> None:
    """Shards that lived on the lost node alone come from their replica; what all processes held comes from the memory of their nodes."""
    whole = begun(stage, "whole", 70, "fsdp2.py")
    assert whole.ends() == 0, whole.log()
    play = begun(stage, "broken", 70, "fsdp2.py")
    play.steps_to(20)
    play.chaos.power_off(0)
    wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=60, explain=play.log)
    assert play.kinds() == ["node-lost"], play.log()
    assert 0 <= lost(play) <= 1, play.log()
    facts = play.incidents()[0].facts
    assert facts is not None, play.log()
    assert facts["source"] == "memory", play.log()
    assert facts["replicas"] >= 1, play.log()
    assert facts["snapshot_age"] == 1, play.log()
    play.steps_to(45)
    row = wait_until(lambda: replicated(play), seconds=60, explain=play.log)
    assert row is not None
    assert row.age_steps == 1, play.log()
    assert row.every == 1
    assert row.copied_s >= row.hidden_s > 0
    assert row.trained_s > row.cost_s > 0
    kill_all(play)
    wait_until(lambda: play.saw(2) and play.incidents()[1].outcome, seconds=60, explain=play.log)
    assert 0 <= lost(play) <= 1, play.log()
    assert play.ends() == 0, play.log()
    assert result(stage, "broken") == result(stage, "whole")
    assert not list((stage.home / "jobs" / "broken" / "checkpoints").glob("step-*"))
    assert stage.kept() == []


def test_copies_under_torchs_own_groups_go_on_from_memory_too(stage: Stage) -> None:
    """There is no vote and nobody stays: new processes find the newest step that all have whole, position and generators with it."""
    results = []
    for name in ("whole", "broken"):
        result = stage.home / f"{name}.json"
        script = str(Path(__file__).with_name("copies.py"))
        nodes = {"wanted": 2, "ranks": 1}
        play = stage.play(name, script=script, args=["100", str(result)], nodes=nodes, checkpoint=ALWAYS)
        if name == "broken":
            play.steps_to(30)
            kill_all(play)
            wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=60, explain=play.log)  # noqa: B023 (called here)
            assert 0 <= lost(play) <= 2, play.log()
        assert play.ends() == 0, play.log()
        results.append(json.loads(result.read_text()))
    assert results[0] == results[1]
