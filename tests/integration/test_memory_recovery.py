"""State in the nodes' memory under a real flow: a node is lost, everybody is killed at once, and no checkpoint was ever written."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import Snapshots, queries
from holdfast.host.process import mark_of
from holdfast.memstore import shared_memory, store_folders
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.snapshots import reports
from tests.integration.stage import Play, Stage
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--heads", "2", "--width", "16", "--context", "16", "--bytes", "50000", "--layers", "2"]
ALWAYS: dict[str, Any] = {"interval": 0, "memory": {"when_late": "pause", "max_pause": "10s"}}
"""No checkpoint on disk, and a snapshot at every step, whatever a busy machine makes of the idle time."""
STEPS = 70
RACKS = {"node-0": "left", "node-1": "left", "node-2": "right", "node-3": "right"}
"""Ranks run in the left rack, spare nodes of the right one keep their replicas."""


@pytest.fixture(scope="module")
def undisturbed(alone: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give what two ranks of the sharded example end with when nothing disturbs them."""
    place = tmp_path_factory.mktemp("u") / "result.json"
    alone(EXAMPLES / "fsdp2.py", *SMALL, "--steps", STEPS, "--result", place)
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def gated(stage: Stage, name: str, *gates: int, spare: int = 1, **checkpoint: Any) -> Play:
    """Start the sharded example with gates before some steps."""
    gate = [str(stage.home), ",".join(map(str, gates)), "fsdp2.py"]
    args = [*gate, *SMALL, "--steps", str(STEPS), "--result", str(stage.home / f"{name}.json")]
    return stage.play(
        name,
        script=str(Path(__file__).with_name("gated.py")),
        args=args,
        nnodes=2,
        nproc_per_node=1,
        spare_nodes=spare,
        hot_spares=0,
        env={"OMP_NUM_THREADS": "1"},  # as the undisturbed run
        checkpoint={**ALWAYS, **checkpoint},
        timeouts={"hang_min": "60s"},  # a gate is no hang
    )


def opens(play: Play, step: int) -> None:
    """Let *step* begin."""
    (play.stage.home / f"gate-{step}").touch()


def home_of(play: Play, node: str) -> str:
    """Return the node that keeps the replicas of *node*; nothing while that is one which is gone."""
    up = [view.name for view in play.stage.nodes.survey() if view.status == "up"]
    answers = {one: play.chaos.ask(one)["memory"] for one in up}
    (home,) = answers[node]["to"]
    return next((one for one, memory in answers.items() if memory["port"] == home[1]), "")


def place(play: Play, node: str) -> Path:
    """Return the memory store of a node."""
    return store_folders.memstore_of(mark_of(play.stage.nodes.folder(node)), play.job.id)


def replicated(play: Play, rank: int) -> tuple[str, int]:
    """Wait at a gate until the newest snapshot of *rank* has a whole replica; return the node on which the rank runs, and the step.

    On a machine without an idle core that may be some steps before the gate: snapshots wait for replicas.
    """
    node = play.chaos.ranks()[rank].node
    home = place(play, wait_until(lambda: home_of(play, node), seconds=60, explain=play.log))

    def steps(place: Path) -> list[int]:
        return sorted(label.step for label in shared_memory.labels(place).values() if label.rank == rank)

    explanation = lambda: f"steps {steps(home)} of {steps(place(play, node))} are copied\n{play.log()}"  # noqa: E731
    wait_until(lambda: steps(home)[-1:] == steps(place(play, node))[-1:] != [], seconds=60, explain=explanation)
    return node, steps(home)[-1]


def newest_of(play: Play, rank: int) -> int:
    """Return the step of the newest whole snapshot of *rank* on its own node."""
    found = shared_memory.labels(place(play, play.chaos.ranks()[rank].node))
    return max(label.step for label in found.values() if label.rank == rank)


def on_disk(play: Play, until: int = STEPS) -> int:
    """Return the step of the newest whole checkpoint that is not after step *until*; 0 while there is none."""
    folder = play.stage.home / "jobs" / play.name / "checkpoints"
    whole = [int(path.name.removeprefix("step-")) for path in manifest.candidates(folder) if manifest.looks_complete(path)]
    return max((step for step in whole if step <= until), default=0)


def cut_off(play: Play, *nodes: str) -> None:
    """Take nodes away, all at once, with all that is in their memory."""
    before = [place(play, node) for node in nodes]
    assert all(shared_memory.labels(one) for one in before)
    with ThreadPoolExecutor() as hands:
        list(hands.map(play.stage.nodes.power_off, nodes))
    assert not any(one.exists() for one in before)


def recovered(play: Play, number: int) -> None:
    """Wait until incident *number* is closed, and see that it was a lost node that the job recovered from."""
    wait_until(lambda: play.saw(number) and play.incidents()[number - 1].outcome, seconds=60, explain=play.log)
    one = play.incidents()[number - 1]
    assert (one.kind, one.outcome) == ("node-lost", "recovered"), play.log()


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


def on_record(play: Play) -> Snapshots | None:
    """Return what a generation after the first has on record of its snapshots and their cost, once others are known to have replicas."""
    row = queries.newest_snapshots(play.stage.history, play.job.id)
    return row if row is not None and row.generation > 1 and row.replica_step is not None and row.trained_s > 0 else None


@pytest.mark.long
def test_a_lost_node_and_then_all_at_once_cost_a_step_each(stage: Stage, undisturbed: dict[str, Any]) -> None:
    """Shards that lived on the lost node alone come from their replica; what all processes held comes from the memory of their nodes."""
    play = gated(stage, "lost-twice", 21, 45, 60)
    play.steps_to(20)
    node, newest = replicated(play, 0)
    cut_off(play, node)
    opens(play, 21)
    recovered(play, 1)
    assert lost(play) in (0, 20 - newest), play.log()
    facts = play.incidents()[0].facts
    assert facts is not None, play.log()
    assert facts["source"] == "memory", play.log()
    assert facts["replicas"] >= 1, play.log()
    assert 0 <= facts["snapshot_age"] <= 21 - newest, f"a snapshot is reported with the step after it\n{play.log()}"
    play.steps_to(44)
    stood = time.monotonic()
    wait_until(lambda: time.monotonic() > stood + reports.REPORT_SECONDS, seconds=60)  # the next beat reports what snapshots cost by now
    opens(play, 45)
    row = wait_until(lambda: on_record(play), seconds=60, explain=play.log)
    assert row is not None
    assert row.age_steps is not None, play.log()
    assert row.age_steps >= 1, play.log()
    assert row.interval_steps == 1
    assert row.copied_s > row.overlapped_s - 1e-9  # sums of the same numbers, rounded apart
    assert row.overlapped_s > 0
    assert row.trained_s > row.cost_s > 0
    there = min(newest_of(play, rank) for rank in (0, 1))
    kill_all(play)
    opens(play, 60)
    wait_until(lambda: play.saw(2) and play.incidents()[1].outcome, seconds=60, explain=play.log)
    assert lost(play) >= 0, play.log()
    assert (play.incidents()[1].resumed_step or 0) >= there, play.log()
    assert play.ends() == 0, play.log()
    assert result(stage, "lost-twice") == undisturbed
    assert not list((stage.home / "jobs" / "lost-twice" / "checkpoints").glob("step-*"))
    assert stage.kept() == []


@pytest.mark.long
def test_copies_under_torchs_own_groups_go_on_from_memory_too(stage: Stage, alone: Callable[..., None]) -> None:
    """There is no vote and nobody stays: new processes find the newest step that all have whole, position and generators with it."""
    script, steps, undisturbed = Path(__file__).with_name("copies.py"), 400, stage.home / "undisturbed.json"
    args = [str(steps), str(stage.home / "broken-rank.json")]
    play = stage.play("broken-rank", script=str(script), args=args, nnodes=2, nproc_per_node=1, checkpoint=ALWAYS, groups="stock")
    play.steps_to(30)
    kill_all(play)
    wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=60, explain=play.log)
    assert 0 <= lost(play) <= 2, play.log()
    assert play.ends() == 0, play.log()
    alone(script, steps, undisturbed, 0)
    assert json.loads(undisturbed.read_text()) == result(stage, "broken-rank")


@pytest.mark.long
def test_what_is_lost_in_memory_comes_from_the_disk(stage: Stage, undisturbed: dict[str, Any]) -> None:
    """A node is lost together with the one that has its replica, then all nodes that hold anything: each time to the newest checkpoint."""
    stage.widen(RACKS)
    play = gated(stage, "disk", 26, 46, spare=2, interval=10)
    play.steps_to(25)
    (node, _), survivor = replicated(play, 0), play.pids()[1]
    home = home_of(play, node)
    assert home not in {placed.node for placed in play.chaos.ranks().values()}
    newest = wait_until(lambda: on_disk(play), seconds=60, explain=play.log)  # on a slow disk not each tenth step is on it
    cut_off(play, node, home)
    opens(play, 26)
    recovered(play, 1)
    first = play.incidents()[0]
    assert (first.action, first.facts and first.facts["source"]) == ("replace-ranks", "checkpoint"), play.log()
    resumed = first.resumed_step or 0
    assert newest <= resumed <= on_disk(play, 25), play.log()
    assert lost(play) == 25 - resumed
    assert play.pids()[1] == survivor
    play.steps_to(45)
    wait_until(lambda: on_disk(play) > resumed, seconds=60, explain=play.log)
    left = [view.name for view in stage.nodes.survey() if view.status == "up"]
    assert len(left) == 2
    cut_off(play, *left)
    newest = on_disk(play)  # nobody is left who writes
    assert stage.kept() == []
    for one in RACKS:
        play.chaos.power_on(one)
    opens(play, 46)
    recovered(play, 2)
    assert play.incidents()[1].resumed_step == newest, play.log()
    assert lost(play) == 45 - newest
    assert play.ends() == 0, play.log()
    assert result(stage, "disk") == undisturbed
    assert stage.kept() == []


@pytest.mark.long
def test_a_lost_replica_is_reported_and_repaired(stage: Stage, undisturbed: dict[str, Any]) -> None:
    """Training goes on as if nothing had been; soon the node that lost its replica can be lost itself, for a step at most."""
    stage.widen(RACKS)
    play = gated(stage, "replica", 21, 41, spare=2)
    play.steps_to(20)
    node, _ = replicated(play, 0)
    home, before = home_of(play, node), play.pids()
    cut_off(play, home)
    wait_until(lambda: home_of(play, node) not in ("", home), seconds=60, explain=play.log)
    opens(play, 21)
    play.steps_to(40)
    again, newest = replicated(play, 0)
    assert again == node
    assert play.incidents() == []
    assert play.pids() == before
    faults = [fault for fault in queries.faults(stage.history, play.job.id) if fault.kind == "replica-lost"]
    assert [(one.node, home in one.evidence["quote"]) for one in faults] == [(node, True)], play.log()
    cut_off(play, node)
    opens(play, 41)
    recovered(play, 1)
    assert lost(play) in (0, 40 - newest)
    one = play.incidents()[0]
    assert (one.action, one.facts and one.facts["source"]) == ("replace-ranks", "memory"), play.log()
    assert play.pids()[1] == before[1]
    assert play.ends() == 0, play.log()
    assert result(stage, "replica") == undisturbed
    assert stage.kept() == []


@pytest.mark.long
def test_replicas_that_lag_cost_steps_and_not_the_job(stage: Stage, undisturbed: dict[str, Any]) -> None:
    """Snapshots wait for them, so that those who live still have the step that is the newest replica of the lost node."""
    memory = {**ALWAYS["memory"], "bandwidth": "200KB"}
    play = gated(stage, "lags", 41, memory=memory)
    play.steps_to(40)
    node = play.chaos.ranks()[0].node
    whole = sorted(label.step for label in shared_memory.labels(place(play, node)).values() if label.rank == 0)
    assert whole[-1] < 39 or whole[-1] - whole[-2] > 1, whole  # some were left out
    cut_off(play, node)
    opens(play, 41)
    recovered(play, 1)
    one = play.incidents()[0]
    assert (one.action, one.facts and one.facts["source"]) == ("replace-ranks", "memory"), play.log()
    assert lost(play) >= 40 - whole[-1], play.log()
    assert play.ends() == 0, play.log()
    assert result(stage, "lags") == undisturbed
