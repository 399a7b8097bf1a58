"""Nodes that are taken away, and known to be: ranks leave while training goes on, or are saved in time, and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import exit_codes
from holdfast.cli.watch import request_stop
from holdfast.history import queries
from holdfast.history.models import JobTransition
from holdfast.runtime.checkpoint import manifest
from tests.integration.stage import Play, Stage
from tests.integration.test_elastic import ends_soon
from tests.integration.test_takeover_flow import begun, goes_on, newest, recovered
from tests.mentions import mentions, one_line_mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

SPARE = {"nnodes": 2, "nproc_per_node": 1, "spare_nodes": 1, "hot_spares": 0}


def drain(play: Play, *words: str) -> dict[str, Any]:
    """Say a person's word about a node of the job's cluster, as a person would; return what programs get."""
    command = [sys.executable, "-m", "holdfast", "node", "drain", *words, "--job", play.name, "--json"]
    done = subprocess.run(command, env=play.stage.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (output,) = json.loads(done.stdout)["nodes"]
    return dict(output)


def moves(play: Play, event: str) -> list[JobTransition]:
    """Return the moves of the job's state that *event* brought about."""
    return [one for one in queries.transitions(play.stage.history, play.job.id) if one.event == event]


def job_events(play: Play) -> str:
    """Return all that was remarked of the job."""
    return "\n".join(one.text for one in queries.job_events(play.stage.history, play.job.id))


def test_ranks_leave_a_drained_node_and_without_room_the_job_waits_for_it_in_time(stage: Stage) -> None:
    """The first node's rank moves to the spare one; the second is left before its time, and comes back once its drain is cancelled."""
    play = begun(stage, "drained", **SPARE, timeouts={"final_checkpoint": "1s"})
    play.steps_to(10)
    before, first = play.pids(), next(iter(newest(play).ranks))
    output = drain(play, first, "--reason", "new fan")
    assert (output["state"], output["drains"], output["by"], output["job"]) == ("cordoned", True, None, play.name)
    wait_until(lambda: first not in newest(play).ranks, seconds=60, explain=play.log)
    goes_on(play)
    assert play.incidents() == [], play.log()
    stays = next(rank for rank, placed in play.chaos.ranks().items() if placed.pid in before.values())
    assert play.pids()[stays] == before[stays]
    wait_until(lambda: next(one for one in stage.nodes.survey() if one.name == first).status == "idle", seconds=60, explain=play.log)

    second = list(newest(play).ranks)[-1]
    drain(play, second, "--in", "10s", "--reason", "old fan")
    play.reaches("WAITING")
    said = job_events(play)
    assert one_line_mentions(said, second, "drained")
    assert one_line_mentions(said, "no other node"), said
    assert [one.kind for one in play.incidents()] == ["node-leaving"]
    drain(play, second, "--cancel")
    recovered(play)
    goes_on(play)
    assert set(newest(play).ranks) >= {second}
    assert first not in newest(play).ranks
    play.stops()


def losses(folder: Path) -> dict[int, set[float]]:
    """Return the loss of each step, as every rank has written it down."""
    found: dict[int, set[float]] = {}
    for path in folder.glob("computed-*"):
        for line in path.read_text().splitlines():
            step, loss, _ = json.loads(line)
            found.setdefault(step, set()).add(loss)
    return found


@pytest.mark.timeout(240)
def test_the_loss_curve_of_a_drained_job_is_that_of_an_undisturbed_one_to_the_bit(
    stage: Stage, alone: Callable[..., None], tmp_path: Path
) -> None:
    """A rank moves to the spare node while training goes on: no step is computed twice, and none otherwise."""
    script = Path(__file__).with_name("shared_out.py")
    play = stage.play(
        "curve",
        script=str(script),
        args=["1000000", str(stage.home), "join"],
        nnodes=2,
        nproc_per_node=1,
        spare_nodes=1,
        hot_spares=1,
        env={"OMP_NUM_THREADS": "1"},
    )
    play.steps_to(10)
    left = play.chaos.ranks()[1].node
    drain(play, left, "--reason", "new fan")
    done = wait_until(
        lambda: [one for one in queries.transitions(stage.history, play.job.id) if one.event == "moved"], seconds=60, explain=play.log
    )
    assert left not in newest(play).ranks
    moved, steps = done[0].at, ends_soon(stage.home)
    assert play.ends() == 0, play.log()
    assert play.incidents() == [], play.log()
    at = [row.step for row in queries.steps(stage.history, play.job.id) if row.at < moved]
    assert 10 <= max(at) < steps, "it moved in the middle"
    alone(script, steps, tmp_path, "join")
    assert losses(stage.home) == losses(tmp_path)
    assert {step: len(found) for step, found in losses(tmp_path).items()} == dict.fromkeys(range(1, steps + 1), 1)


@pytest.mark.timeout(240)
def test_a_job_ends_saved_before_its_allocation_does_on_nodes_that_are_there_so_long(stage: Stage) -> None:
    """A node with maintenance before then is passed over; what is planned while it runs counts; the next run goes on from its end."""
    now = datetime.now(UTC)
    early = {"nodes": ["node-0"], "start": str(now + timedelta(seconds=70)), "lead_time": "1s", "reason": "new fan"}
    late = {"nodes": ["node-1"], "start": str(now + timedelta(hours=1)), "lead_time": "2h", "reason": "new disk"}
    plan = stage.home / "cluster.json"
    described = {"kind": "local", "name": "stage", "nodes": stage.count, "directory": str(stage.home / "nodes")}
    plan.write_text(json.dumps({**described, "maintenance": [early]}))
    stage.cluster = {"maintenance": [early], "maintenance_file": str(plan)}
    play = stage.play(
        "timed",
        script=str(Path(__file__).with_name("copies.py")),
        args=["1000000", str(stage.home / "never.json"), "0.1"],
        nnodes=2,
        nproc_per_node=1,
        checkpoint={"interval": 0, "memory": {"when_late": "pause", "max_pause": "10s"}},
        walltime="75s",
        timeouts={"final_checkpoint": "15s"},  # it ends after a minute: until then a busy machine has started it
        env={"OMP_NUM_THREADS": "1"},
    )
    play.steps_to(3)
    assert set(newest(play).ranks) == {"node-1", "node-2"}
    assert one_line_mentions(job_events(play), "node-0", "new fan")
    plan.write_text(json.dumps({**described, "maintenance": [early, late]}))
    wait_until(lambda: "node-1 is to be drained: new disk from " in job_events(play), seconds=60, explain=play.log)

    assert play.ends() == exit_codes.TIME_OVER, play.log()
    assert mentions(play.reason(), "1 min 15 s", "`walltime`"), play.log()
    saved = next(manifest.complete_steps(stage.home / "jobs" / "timed" / "checkpoints"))
    assert one_line_mentions(job_events(play), f"step {saved}", "memory"), play.log()
    last = queries.last_step(stage.history, play.job.id)
    assert last is not None
    assert saved >= last.step - 2
    ended = queries.transitions(stage.history, play.job.id)[-1]
    assert ended.at < play.job.at + 75

    spec = json.loads(play.spec.read_text())
    spec["cluster"] |= {"maintenance": [], "maintenance_file": None}
    play.spec.write_text(json.dumps(spec))
    again = stage.again("timed", play.spec)
    again.steps_to(saved + 1)
    assert again.job.id != last.job_id
    assert newest(again).resumed_step == saved, again.log()
    request_stop(stage.history, again.job)
    assert again.ends() == 3, again.log()


def test_a_node_under_a_notice_is_left_in_time(stage: Stage) -> None:
    """By a signal to its agent: its rank moves to the spare node while training goes on; nothing is computed twice."""
    play = begun(stage, "moves", **SPARE)
    play.steps_to(10)
    os.kill(play.chaos.ask("node-1")["pid"], signal.SIGTERM)
    wait_until(lambda: "node-1" not in newest(play).ranks, seconds=60, explain=play.log)
    goes_on(play)
    assert play.incidents() == [], play.log()
    play.stops()
