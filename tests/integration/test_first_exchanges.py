"""What ranks exchanged before their first step, under a real flow: a hot spare that becomes a rank holds it, or the next action answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import queries
from tests.integration.stage import Play, Stage
from tests.integration.test_takeover_flow import goes_on, recovered, stands_by
from tests.mentions import mentions
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "runtime" / "scripts" / "beginnings.py"
RANKS = 3


def held(play: Play, rank: int) -> dict[str, Any]:
    """Wait for the file in which the present process of *rank* wrote what it holds; take it away, so that the next one writes it anew."""
    file = play.stage.home / f"result-{rank}.json"
    wait_until(file.exists, seconds=60, explain=play.log)
    found: dict[str, Any] = json.loads(wait_until(file.read_text, seconds=60))
    file.unlink()
    return found


@pytest.mark.long
def test_a_replaced_rank_gets_what_it_received_and_a_new_random_name_restarts_all(stage: Stage) -> None:
    """The hot spare leaves its place to its successor; when rank 0 is lost, whose name the others have, the replacement is not retried."""
    stage.widen({f"node-{number}": f"node-{number}" for number in range(4)})
    play = stage.play(
        "beginnings",
        script=str(SCRIPT),
        args=[str(stage.home), "1000000", "name", "draws", "slow"],
        nnodes=RANKS,
        nproc_per_node=1,
        spare_nodes=1,
        hot_spares=1,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeouts={"hang_min": "60s"},
    )
    play.steps_to(3)
    first = [held(play, rank) for rank in range(RANKS)]
    stands_by(play)
    before = play.pids()
    play.chaos.kill(2)
    recovered(play)
    goes_on(play)
    assert [one.action for one in queries.decisions(stage.history, play.job.id)] == ["replace-ranks"], play.log()
    assert held(play, 2) == first[2]
    differs = [one.text for one in queries.job_events(stage.history, play.job.id) if "took over, differs from before" in one.text]
    assert len(differs) == 1, differs
    assert mentions(differs[0], "rank 2")
    assert mentions(differs[0], "'allreduce/(1,)float32'")
    assert {rank: pid for rank, pid in play.pids().items() if rank != 2} == {0: before[0], 1: before[1]}
    play.chaos.kill(0)
    recovered(play, 2)
    goes_on(play)
    decisions = queries.decisions(stage.history, play.job.id)[1:]
    assert [one.action for one in decisions] == ["replace-ranks", "restart-workers"], play.log()
    assert mentions(decisions[1].passed_over["ReplaceRanks"], "other objects")
    second = [held(play, rank) for rank in range(RANKS)]
    assert second[0]["name"] == second[1]["name"] == second[2]["name"] != first[0]["name"]
    play.stops()
