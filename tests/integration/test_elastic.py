"""A job that loses a node and has no spare: the others go on in their processes, until the node is back."""

from __future__ import annotations

from pathlib import Path

from holdfast.history import queries
from tests.integration.stage import Play, Stage
from tests.waiting import wait_until

SCRIPT = str(Path(__file__).parents[2] / "examples" / "elastic.py")
SMALL = ["--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--bytes", "20000", "--batch", "6", "--steps", "1000000"]

ONE = {"OMP_NUM_THREADS": "1"}
"""Ranks of several nodes that are one machine must not fight for its cores."""


def begun(play: Play) -> None:
    """Wait until the job has told who holds copies of what."""

    def told() -> bool:
        newest = queries.newest_generation(play.stage.history, play.job.id)
        return newest is not None and bool((newest.facts or {}).get("copies"))

    play.steps_to(3)
    wait_until(told, seconds=60, explain=play.log)


def test_without_a_spare_the_living_go_on_in_their_processes_until_the_node_is_back(stage: Stage) -> None:
    """Rank 0's node goes and comes again: nobody else starts anew, no step is lost, and the second change is no incident."""
    play = stage.play("elastic", script=SCRIPT, args=SMALL, environment=ONE, nodes={"wanted": 3, "least": 2, "ranks": 1})
    begun(play)
    before = play.pids()
    _, node = play.chaos.power_off(0)
    wait_until(lambda: play.saw(1) and all(one.outcome for one in play.incidents()), seconds=60, explain=play.log)
    seen = play.chaos.step()
    wait_until(lambda: play.chaos.step() > seen + 3, seconds=60, explain=play.log)
    found = play.incidents()
    assert [(one.kind, one.rung, one.outcome, one.steps_lost) for one in found] == [("node-lost", "narrow", "recovered", 0)], play.log()
    assert "on with 2 of 3 copies of the model" in found[0].because
    assert play.pids() == {rank: before[rank] for rank in (1, 2)}
    newest = queries.newest_generation(stage.history, play.job.id)
    assert newest is not None
    assert (newest.world_size, sorted(rank for ranks in newest.ranks.values() for rank in ranks)) == (2, [1, 2])
    play.chaos.power_on(node)
    wait_until(lambda: play.pids().keys() == {0, 1, 2}, seconds=80, explain=play.log)
    seen = play.chaos.step()
    wait_until(lambda: play.chaos.step() > seen + 3, seconds=60, explain=play.log)
    assert {rank: pid for rank, pid in play.pids().items() if rank} == {rank: before[rank] for rank in (1, 2)}
    assert len(play.incidents()) == 1, play.log()
    told = [move.because for move in queries.moves(stage.history, play.job.id) if move.event == "moved"]
    assert len(told) == 1
    assert f"rank 0 came to {node}: 3 of 3 ranks share each step's samples" in told[0]

    from holdfast.cli.watching import request_stop  # noqa: PLC0415 (what `holdfast stop` does)

    request_stop(stage.history, play.job)
    assert play.ends() == 3, play.log()
