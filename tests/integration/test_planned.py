"""Nodes that are taken away, and known to be: ranks leave while training goes on, or are saved in time, and come back."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from holdfast.history import queries
from tests.integration.stage import Play, Stage
from tests.integration.test_takeover_flow import begun, ended, goes_on, newest, recovered
from tests.waiting import wait_until

SPARE = {"wanted": 2, "ranks": 1, "spare": 1, "standbys": 0}


def drain(play: Play, *words: str) -> dict[str, Any]:
    """Say a person's word about a node of the job's cluster, as a person would; return what programs are told."""
    command = [sys.executable, "-m", "holdfast", "drain", *words, "--job", play.name, "--json"]
    done = subprocess.run(command, env=play.stage.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def remarks(play: Play) -> str:
    """Return all that was remarked of the job."""
    return "\n".join(one.text for one in queries.remarks(play.stage.history, play.job.id))


def test_ranks_leave_a_drained_node_and_without_room_the_job_waits_for_it_in_time(stage: Stage) -> None:
    """The first node's rank moves to the spare one; the second is left before its time, and comes back once its drain is cancelled."""
    play = begun(stage, "drained", nodes=SPARE, limits={"last_save": "1s"})
    play.steps_to(10)
    before, first = play.pids(), next(iter(newest(play).ranks))
    told = drain(play, first, "--because", "new fan")
    assert (told["state"], told["drains"], told["by"], told["job"]) == ("held", True, None, play.name)
    wait_until(lambda: first not in newest(play).ranks, seconds=60, explain=play.log)
    goes_on(play)
    assert play.incidents() == [], play.log()
    stays = next(rank for rank, placed in play.chaos.ranks().items() if placed.pid in before.values())
    assert play.pids()[stays] == before[stays]
    wait_until(lambda: next(one for one in stage.nodes.survey() if one.name == first).standing == "idle", seconds=30, explain=play.log)

    second = list(newest(play).ranks)[-1]
    drain(play, second, "--in", "10s", "--because", "old fan")
    play.reaches("WAITING")
    said = remarks(play)
    assert f"{second} is to be left: drained by " in said
    assert "no other node is free; training goes on there" in said, said
    assert [one.kind for one in play.incidents()] == ["node-leaving"]
    drain(play, second, "--cancel")
    recovered(play)
    goes_on(play)
    assert set(newest(play).ranks) >= {second}
    assert first not in newest(play).ranks
    ended(play)
