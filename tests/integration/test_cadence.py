"""A job whose cadence follows what was measured: at a recovery it goes over to another one, and the history says why."""

from __future__ import annotations

from holdfast.history import queries
from tests.integration.stage import Stage

SAVES = "if rank == 0 and step % int(os.environ['HOLDFAST_SAVE_EVERY']) == 0: line.saved(step, f'/c/{step}', 0.001, 1)"
"""The paced script writes no real checkpoint, but tells of one whenever one is due."""


def test_a_recovery_takes_the_cadence_that_the_measured_figures_ask_for(stage: Stage) -> None:
    """From 40 steps, the most allowed, to fewer: saves cost a millisecond, and a fault came within the first seconds."""
    plan = {"every": "auto", "every_least": 2, "every_most": 40}
    args = ["--steps", "200", "--pace", "0.02", "--each", SAVES]
    play = stage.play("paced-saves", args=args, nodes={"wanted": 2, "ranks": 1}, checkpoint=plan)
    play.chaos.at_step(130, lambda: play.chaos.kill(1))
    assert play.ends() == 0, play.log()
    assert play.kinds() == ["worker-sigkill"]
    first, second = (one.facts or {} for one in queries.generations(stage.history, play.job.id))
    assert first["every"] == 40
    every = second["every"]
    assert 2 <= every < 30
    saved = queries.checkpoints(stage.history, play.job.id)
    assert [one.step for one in saved if one.generation == 1] == [40, 80, 120]
    after = [one.step or 0 for one in saved if one.generation == 2]
    assert len(after) > 1
    assert all(step % every == 0 for step in after)
    told = [one.text for one in queries.remarks(stage.history, play.job.id) if "on a checkpoint every" in one.text]
    assert told[0] == "from generation 1 on a checkpoint every 40 steps: 0 save(s) have been measured, 3 are needed to judge what they cost"
    assert told[1].startswith(f"from generation 2 on a checkpoint every {every} steps (before: 40): a save costs 1 ms, a step ")
    assert len(told) == 2
