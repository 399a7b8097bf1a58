"""Replaced ranks and planned migrations under a real flow: who stays, who comes, what is decided, and that no step is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import Generation, queries
from tests.integration.stage import Play, Stage
from tests.integration.test_adoption import has_been_in
from tests.mentions import mentions
from tests.waiting import wait_until

GROUPS = Path(__file__).with_name("paced_groups.py")
TWO = {"nnodes": 2, "nproc_per_node": 1}
SPARE = {"nnodes": 2, "nproc_per_node": 1, "spare_nodes": 1}


def begun(stage: Stage, name: str, *more: str, **fields: Any) -> Play:
    """Start a job whose groups can be mended."""
    return stage.play(name, script=str(GROUPS), args=["--steps", "100000", *more], **fields)


def hot_spares(play: Play) -> dict[str, dict[str, Any]]:
    """Return the hot spares that agents have, by node and number."""
    up = [view.name for view in play.stage.nodes.survey() if view.status == "up"]
    return {f"{node}/{number}": one for node in up for number, one in play.chaos.ask(node)["hot_spares"].items()}


def stands_by(play: Play, count: int = 1) -> None:
    """Wait until so many hot spares are ready, and all ranks at work."""
    wait_until(
        lambda: sum(one["ready"] for one in hot_spares(play).values()) >= count and play.chaos.complete(),
        seconds=60,
        explain=lambda: f"{hot_spares(play)}\n{play.log()}",
    )


def recovered(play: Play, number: int = 1) -> None:
    """Wait until incident *number* is closed."""
    wait_until(lambda: len(play.incidents()) >= number and all(one.outcome for one in play.incidents()), seconds=60, explain=play.log)


def goes_on(play: Play) -> None:
    """Wait until the job makes steps in its newest generation."""
    seen = play.chaos.step()
    wait_until(lambda: play.chaos.step() > seen + 3, seconds=60, explain=play.log)


def checkpoints(play: Play) -> Path:
    """Return the folder that the script calls `folder`."""
    return play.stage.home / "jobs" / play.name / "checkpoints"


def printed_lines(play: Play, word: str, who: str) -> list[list[str]]:
    """Return what the process that was started as *who* has printed in the lines that begin with *word*."""
    lines = (play.stage.home / "jobs" / play.name / "logs" / f"{who}.log").read_text().splitlines()
    return [line.split()[1:] for line in lines if line.split()[:1] == [word]]


def newest(play: Play) -> Generation:
    """Return the job's newest generation."""
    found = queries.newest_generation(play.stage.history, play.job.id)
    assert found is not None
    return found


@pytest.mark.long  # the demo does the same, and more
def test_a_killed_rank_goes_on_in_a_hot_spare_and_the_others_keep_their_processes(stage: Stage) -> None:
    """The hot spare waits on the spare node; the next one is started when training runs again. Then the node of rank 0 is lost.

    That leaves no spare node: a free one of the cluster is taken in, and the next hot spare waits there. With each generation those that
    live learn where memory is served now: on their own node, and on those without a rank.
    """
    on_regroup = "if order['do'] == 'regroup': print('servers', *order['memory'], flush=True)"
    stage.widen({f"node-{number}": f"node-{number}" for number in range(4)})
    play = begun(stage, "hot-spare", "--on", on_regroup, **SPARE)
    stands_by(play)
    before = play.pids()
    waiting = next(iter(hot_spares(play).values()))["pid"]
    play.chaos.kill(1)
    recovered(play)
    goes_on(play)
    assert [(one.kind, one.action, one.outcome) for one in play.incidents()] == [("worker-sigkill", "replace-ranks", "recovered")], (
        play.log()
    )
    assert play.pids() == {0: before[0], 1: waiting}
    assert newest(play).ranks == {"node-0": [0], "node-2": [1]}
    assert "hot spare 0 on node-2" in play.incidents()[0].reason
    assert newest(play).facts is not None
    facts = play.incidents()[0].facts
    assert facts is not None
    assert (facts["source"], facts["rebuilt"], list(facts["coverage"])) == ("live", 1, ["1"])
    assert any(mentions(one.text, "hot spare 0 on node-2") for one in queries.job_events(stage.history, play.job.id))
    stands_by(play)
    play.chaos.power_off(0)
    recovered(play, 2)
    goes_on(play)
    assert [(one.kind, one.action) for one in play.incidents()][1:] == [("node-lost", "replace-ranks")], play.log()
    assert set(newest(play).ranks) <= {"node-1", "node-2"}
    assert printed_lines(play, "servers", "rank-0")[0] == ["node-0", "node-1"]
    assert printed_lines(play, "servers", "hot-spare-0")[-1] == ["node-2"]
    stands_by(play)
    assert [place.partition("/")[0] for place in hot_spares(play)] == ["node-3"], play.log()
    assert [mentions(one.text, "node-3") for one in queries.job_events(stage.history, play.job.id) if mentions(one.text, "added")] == [True]
    play.stops()


@pytest.mark.long
def test_without_a_hot_spare_a_fresh_process_takes_over_on_the_same_node(stage: Stage) -> None:
    """A kill, a stopped rank and an exception, one after the other: nobody else restarts."""
    each = "if rank == 1 and (folder / 'cloud').exists(): (folder / 'cloud').unlink(); raise ValueError('a passing cloud')"
    play = begun(stage, "fresh", "--each", each, **TWO, timeouts={"stopped_process": "300ms"})
    play.steps_to(10)
    before = play.pids()
    play.chaos.kill(1)
    recovered(play)
    goes_on(play)
    play.chaos.stop(1)
    recovered(play, 2)
    goes_on(play)
    (checkpoints(play) / "cloud").touch()
    recovered(play, 3)
    goes_on(play)
    assert play.kinds() == ["worker-sigkill", "worker-stopped", "worker-exception"]
    assert {one.action for one in play.incidents()} == {"replace-ranks"}, play.log()
    assert play.pids()[0] == before[0]
    assert newest(play).number == 4
    assert newest(play).ranks == {"node-0": [0], "node-1": [1]}
    play.stops()


@pytest.mark.long
def test_groups_that_broke_without_a_lost_rank_cost_the_step_and_no_process(stage: Stage) -> None:
    """Every rank reports a broken connection and lives: all stay where they are, meet again and do the step again."""
    each = (
        "while step == 30 and generation == 1 and not (folder / 'cut').exists(): time.sleep(0.01)\n"
        "if step == 30 and generation == 1: line.report('broken', generation=1, step=29, group='0', why='Connection reset by peer')"
    )
    play = begun(stage, "blip", "--each", each, **TWO)
    play.steps_to(10)
    before = play.pids()
    (checkpoints(play) / "cut").touch()
    wait_until(lambda: play.saw(1), seconds=60, explain=play.log)
    recovered(play)
    goes_on(play)
    assert [(one.kind, one.action, one.outcome) for one in play.incidents()] == [("group-broken", "retry-step", "recovered")], play.log()
    assert play.pids() == before
    assert newest(play).number == 2
    play.stops()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "on", "why"),
    [
        ("cannot", "if order['do'] == 'regroup': line.report('recovery-failed', generation=order['generation'], why='no copy')", "no copy"),
        (
            "newcomer",
            "if joins: raise MemoryError('cannot allocate 140 TB')",
            "the new process of rank 1 failed by itself",
        ),
    ],
)
def test_a_take_over_that_cannot_work_is_not_tried_again(stage: Stage, name: str, on: str, why: str) -> None:
    """A worker says that it cannot go on, or each new process fails by itself: the next action follows at once; the history says why."""
    play = begun(stage, name, "--on", on, **TWO)
    play.steps_to(10)
    play.chaos.kill(1)
    recovered(play)
    goes_on(play)
    decisions = queries.decisions(stage.history, play.job.id)
    assert [one.action for one in decisions] == ["replace-ranks", "restart-workers"], play.log()
    assert why in decisions[1].passed_over["ReplaceRanks"]
    play.stops()


@pytest.mark.long
def test_a_second_rank_lost_during_a_take_over_is_taken_over_too(stage: Stage) -> None:
    """It is decided anew: one incident, two replacements of ranks, and rank 0 is where it was."""
    dies = "if order['do'] == 'regroup' and rank == 2 and order['generation'] == 2: os.kill(os.getpid(), 9)"
    play = begun(stage, "twice", "--on", dies, nnodes=3, nproc_per_node=1)
    play.steps_to(10)
    before = play.pids()
    play.chaos.kill(1)
    recovered(play)
    goes_on(play)
    decisions = queries.decisions(stage.history, play.job.id)
    assert [one.action for one in decisions] == ["replace-ranks", "replace-ranks"], play.log()
    assert len(play.incidents()) == 1
    assert play.pids()[0] == before[0]
    play.stops()


@pytest.mark.long
def test_ranks_whose_node_refused_them_are_placed_anew_with_the_one_it_refused_them_for(stage: Stage) -> None:
    """The agent of node-0 is to promote its hot spare to rank 1 and to keep rank 0, which has just ended: it does neither."""
    dies = "if order['do'] == 'abandon' and rank == 0 and order['generation'] == 1: os.kill(os.getpid(), 9)"
    play = begun(stage, "refused", "--on", dies, nnodes=3, nproc_per_node=1, hot_spares=1)
    stands_by(play)
    assert list(hot_spares(play)) == ["node-0/0"]
    before = play.pids()
    play.chaos.kill(1)
    recovered(play)
    goes_on(play)
    decisions = queries.decisions(stage.history, play.job.id)
    assert [one.action for one in decisions] == ["replace-ranks", "replace-ranks"], play.log()
    assert play.pids()[2] == before[2]
    play.stops()


def moved(play: Play, *what: str) -> tuple[int, dict[str, Any]]:
    """Ask for a planned move as a person does; return the exit status and what was printed."""
    words = [sys.executable, "-m", "holdfast", "node", "migrate", play.name, *what, "--timeout", "30s", "--json"]
    done = subprocess.run(words, env=play.stage.environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout, done.stderr
    (output,) = json.loads(done.stdout)["migrations"]
    return done.returncode, output


@pytest.mark.long
def test_ranks_move_to_another_node_while_training_goes_on(stage: Stage) -> None:
    """Rank 0, which hosts the store, leaves node-0 for the spare node; then a joiner that dies costs nothing but the move."""
    dies = "if order['do'] == 'prepare' and hot_spare is not None and order['rank'] == 1: os._exit(1)"
    play = begun(stage, "dies-in-a-move", "--on", dies, **SPARE)
    stands_by(play)
    before = play.pids()
    waiting = next(iter(hot_spares(play).values()))["pid"]
    status, output = moved(play, "--from", "node-0")
    assert (status, output["moved"]) == (0, True), f"{output}\n{play.log()}"
    goes_on(play)
    assert newest(play).ranks == {"node-1": [1], "node-2": [0]}
    assert play.pids() == {0: waiting, 1: before[1]}
    assert play.incidents() == []
    assert [move.after for move in queries.transitions(stage.history, play.job.id)][-2:] == ["MIGRATING", "RUNNING"]
    status, output = moved(play, "--rank", "1", "--to", "node-0")
    assert (status, output["moved"]) == (1, False), f"{output}\n{play.log()}"
    assert "lost" in output["outcome"]
    goes_on(play)
    assert newest(play).number == 2
    assert play.incidents() == []
    assert play.pids() == {0: waiting, 1: before[1]}
    status, output = moved(play, "--rank", "7")
    assert (status, "no rank 7" in output["outcome"]) == (1, True)
    play.stops()


@pytest.mark.long
def test_a_flow_that_comes_later_takes_the_hot_spares_over_and_ends_what_another_began(stage: Stage) -> None:
    """It learns from agents and history what waits and who is what; a replacement that comes to nothing is followed by a restart."""
    stuck = "if order['do'] == 'regroup' and rank == 0 and order['generation'] == 3: time.sleep(600)"
    play = begun(stage, "heirs", "--on", stuck, **SPARE, timeouts={"recovery": {"replace_ranks": "10s"}})
    stands_by(play)
    before = play.pids()
    waiting = next(iter(hot_spares(play).values()))["pid"]
    play.dies()
    play = stage.again("heirs", play.spec)
    wait_until(
        lambda: any("reattached" in one.text for one in queries.job_events(stage.history, play.job.id)), seconds=60, explain=play.log
    )
    play.chaos.kill(1)
    recovered(play)
    goes_on(play)
    assert play.pids() == {0: before[0], 1: waiting}, play.log()
    play.chaos.kill(1)
    play.reaches("RESUMING")
    play.dies()
    play = stage.again("heirs", play.spec)
    recovered(play, 2)
    goes_on(play)
    assert [one.action for one in queries.decisions(stage.history, play.job.id)] == ["replace-ranks", "replace-ranks", "restart-workers"], (
        play.log()
    )
    play.stops()


@pytest.mark.long
def test_a_flow_that_dies_in_any_state_of_a_takeover_is_replaced(stage: Stage) -> None:
    """The job goes on and every loss is answered; where nobody can say how far the replacement of ranks came, by a restart that says so."""
    play = begun(stage, "dies-in-a-recovery", **TWO, max_recoveries_without_progress=10)
    play.steps_to(10)
    for number, state in enumerate(("DIAGNOSING", "ISOLATING", "RESCHEDULING", "RESUMING"), 1):
        seen = len(queries.transitions(stage.history, play.job.id))
        play.chaos.kill(1)
        wait_until(partial(has_been_in, play, state, seen), seconds=60, explain=play.log)
        play.dies()
        play = stage.again("dies-in-a-recovery", play.spec)
        recovered(play, number)
        goes_on(play)
    assert {one.kind for one in play.incidents()} == {"worker-sigkill"}, play.log()
    decisions = queries.decisions(stage.history, play.job.id)
    assert {one.action for one in decisions} <= {"replace-ranks", "restart-workers"}
    whys = [one.passed_over.get("ReplaceRanks", "") for one in decisions if one.action == "restart-workers"]
    assert all("the controller died" in why for why in whys), whys
    play.stops()


@pytest.mark.long
def test_a_restart_after_two_ranks_came_to_one_node_starts_them_all(stage: Stage) -> None:
    """The only node that is left holds both after a replacement; when it cannot go on so, both are started anew, on two nodes again."""
    stuck = "if order['do'] == 'regroup' and order['generation'] == 3: line.report('recovery-failed', generation=3, why='no copy')"
    play = begun(stage, "crowded", "--on", stuck, nnodes=2, nproc_per_node=1, hot_spares=1)
    stands_by(play)
    home = next(iter(hot_spares(play))).partition("/")[0]
    (away,) = (rank for rank, placed in play.chaos.ranks().items() if placed.node != home)
    play.chaos.kill(away)
    recovered(play)
    goes_on(play)
    assert newest(play).ranks == {home: [1 - away, away]}, play.log()
    play.chaos.kill(away)
    recovered(play, 2)
    goes_on(play)
    assert [one.action for one in queries.decisions(stage.history, play.job.id)][-1] == "restart-workers", play.log()
    assert sorted(newest(play).ranks.values()) == [[0], [1]], play.log()
    play.stops()
