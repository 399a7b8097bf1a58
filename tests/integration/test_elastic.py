"""A job that loses a node and has no spare: the others go on in their processes, until the node is back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.history import Generation, queries
from tests.integration.stage import Play, Stage
from tests.integration.test_memory_recovery import cut_off, replicated
from tests.mentions import mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

SCRIPT = str(Path(__file__).parents[2] / "examples" / "elastic.py")
SMALL = ["--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--bytes", "20000", "--batch", "6", "--steps", "1000000"]

ONE = {"OMP_NUM_THREADS": "1"}
"""Ranks of several nodes that are one machine must not fight for its cores."""


def begun(play: Play) -> None:
    """Wait until the job has reported who holds copies of what."""

    def has_copies() -> bool:
        newest = queries.newest_generation(play.stage.history, play.job.id)
        return newest is not None and bool((newest.facts or {}).get("copies"))

    play.steps_to(3)
    wait_until(has_copies, seconds=60, explain=play.log)


def test_without_a_spare_the_living_go_on_in_their_processes_until_the_node_is_back(stage: Stage) -> None:
    """Rank 0's node goes and comes again: nobody else starts anew, no step is lost, and the second change is no incident."""
    play = stage.play("elastic", script=SCRIPT, args=SMALL, env=ONE, nnodes="2:3", nproc_per_node=1)
    begun(play)
    before = play.pids()
    _, node = play.chaos.power_off(0)
    wait_until(lambda: play.saw(1) and all(one.outcome for one in play.incidents()), seconds=60, explain=play.log)
    seen = play.chaos.step()
    wait_until(lambda: play.chaos.step() > seen + 3, seconds=60, explain=play.log)
    found = play.incidents()
    assert [(one.kind, one.action, one.outcome, one.steps_lost) for one in found] == [("node-lost", "shrink-live", "recovered", 0)], (
        play.log()
    )
    assert mentions(found[0].reason, "2 of 3 copies")
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
    reasons = [move.reason for move in queries.transitions(stage.history, play.job.id) if move.event == "moved"]
    assert len(reasons) == 1
    assert mentions(reasons[0], "rank 0", node, "3 of 3 ranks")

    play.stops()


def computed(folder: Path) -> dict[int, tuple[float, list[list[list[int]]]]]:
    """Return the loss of each step as it counts, and which samples were computed in it, rank by rank, share by share."""
    found: dict[int, dict[int, tuple[float, list[list[list[int]]]]]] = {}
    for path in sorted(folder.glob("computed-*")):
        generation = int(path.name.split("-")[1])
        for line in path.read_text().splitlines():
            step, loss, samples = json.loads(line)
            found.setdefault(step, {}).setdefault(generation, (loss, []))[1].append(samples)
    return {step: by_generation[max(by_generation)] for step, by_generation in sorted(found.items())}


def ends_soon(folder: Path) -> int:
    """Have a job of the script `shared_out.py` end after a step to which no rank has come yet; return the step."""
    whole = (line for path in folder.glob("computed-*") for line in path.read_text().split("\n")[:-1])
    last: int = max(json.loads(line)[0] for line in whole) + 150
    beside = folder / "last-step.new"
    beside.write_text(str(last))
    beside.replace(folder / "last-step")
    return last


@pytest.mark.timeout(240)
def test_under_torchs_own_groups_a_job_starts_again_on_fewer_nodes_and_on_more_with_the_same_samples(
    stage: Stage, alone: Callable[..., None], tmp_path: Path
) -> None:
    """A node of three goes and comes again: nobody can stay in its process, and each step has the samples that it has with three."""
    script = Path(__file__).with_name("shared_out.py")
    play = stage.play(
        "narrower",
        script=str(script),
        groups="stock",
        args=["1000000", str(stage.home), "gate-21"],
        nnodes="2:3",
        nproc_per_node=1,
        env=ONE,
        timeouts={"hang_min": "60s"},  # a gate is no hang
    )
    play.steps_to(20)
    node, kept = replicated(play, 1)
    cut_off(play, node)
    (stage.home / "gate-21").touch()
    wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=80, explain=play.log)
    (one,) = play.incidents()
    assert (one.kind, one.action, one.outcome) == ("node-lost", "shrink-restart", "recovered"), play.log()
    assert f"continue without {node} on 2 nodes" in one.reason
    narrow = one.resumed_step or 0
    assert narrow >= kept, f"the memory of nodes had it, or a newer one that arrived meanwhile\n{play.log()}"
    seen = play.chaos.step()
    play.chaos.power_on(node)

    def grown() -> Generation | None:
        newest = queries.newest_generation(stage.history, play.job.id)
        assert newest is not None
        return newest if newest.world_size == 3 and newest.first_step_at is not None else None

    wide = wait_until(lambda: grown() if play.state() == "RUNNING" else None, seconds=80, explain=play.log)
    assert wide is not None
    again = wide.resumed_step or 0
    assert again > seen
    last = ends_soon(stage.home)
    assert play.ends() == 0, play.log()
    assert len(play.incidents()) == 1, play.log()
    reasons = [move.reason for move in queries.transitions(stage.history, play.job.id) if move.event == "moved"]
    assert len(reasons) == 1
    assert mentions(reasons[0], node, "3 ranks")

    alone(script, last, tmp_path, ranks=3)
    whole, mine = computed(tmp_path), computed(stage.home)
    assert list(mine) == list(whole) == list(range(1, last + 1))
    assert {len(ranks) for _, ranks in whole.values()} == {3}
    assert {step: len(ranks) for step, (_, ranks) in mine.items()} == {step: 2 if narrow < step <= again else 3 for step in mine}
    for step, (loss, ranks) in mine.items():
        at_full, samples = whole[step]
        assert sorted(one for rank in ranks for share in rank for one in share) == sorted(one for rank in samples for one in rank[0])
        assert max(len(share) for rank in ranks for share in rank) <= 6  # a third of 16: what fits a rank at full width
        assert loss == pytest.approx(at_full, rel=1e-3), step
