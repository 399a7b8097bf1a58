"""A job whose cadence follows what was measured: at a recovery it goes over to another one, and the history says why."""

from __future__ import annotations

import pytest

from holdfast.history import queries
from tests.integration.stage import Stage
from tests.mentions import mentions

pytestmark = pytest.mark.long

EVERY = "os.environ['HOLDFAST_SAVE_EVERY']"
SAVES = (
    f"if rank == 0 and step % int({EVERY}) == 0: "
    f"wish = line.may_commit(step).every; line.saved(step, f'/c/{{step}}', 0.001, 1); {EVERY} = str(wish or {EVERY})"
)
"""The paced script writes no real checkpoint, but asks for leave and reports one whenever one is due, as the runtime does."""


def test_a_recovery_takes_the_cadence_that_the_measured_figures_ask_for(stage: Stage) -> None:
    """From 40 steps, the most allowed, to fewer: saves cost a millisecond, and a fault came within the first seconds."""
    plan = {"interval": "auto", "min_interval": 2, "max_interval": 40}
    waits = "while generation == 1 and step == 140: time.sleep(1)"  # for the fault, which comes before a fourth save
    args = ["--steps", "200", "--pace", "0.02", "--each", f"{SAVES}\n{waits}"]
    play = stage.play("paced-saves", args=args, nnodes=2, nproc_per_node=1, checkpoint=plan)
    play.chaos.at_step(130, lambda: play.chaos.kill(1))
    assert play.ends() == 0, play.log()
    assert play.kinds() == ["worker-sigkill"]
    first, second = (one.facts or {} for one in queries.generations(stage.history, play.job.id))
    assert first["every"] == 40
    assert 2 <= second["every"] < 30
    saved = queries.checkpoints(stage.history, play.job.id)
    assert [one.step for one in saved if one.generation == 1] == [40, 80, 120]
    after = [one.step or 0 for one in saved if one.generation == 2]
    assert len(after) > 1
    texts = [one.text for one in queries.job_events(stage.history, play.job.id) if "on a checkpoint every" in one.text]
    assert mentions(texts[0], "generation 1", "every 40 steps", "0 saves", 3)
    assert mentions(texts[1], "generation 2", "before: 40", "1 ms")


def test_a_running_job_goes_over_to_the_measured_cadence_with_a_save(stage: Stage) -> None:
    """Without a fault: once three saves have shown how little is gained by so many, there are as few as allowed."""
    waits = "while rank == 0 and step == 550 and not line.may_commit(step).every: time.sleep(0.05)"  # for the controller's word
    args = ["--steps", "900", "--pace", "0.01", "--each", f"{SAVES}\n{waits}"]
    play = stage.play("quiet", args=args, nnodes=2, nproc_per_node=1, checkpoint={"interval": "auto", "max_interval": 400})
    assert play.ends() == 0, play.log()
    assert play.kinds() == []
    saved = [one.step for one in queries.checkpoints(stage.history, play.job.id)]
    assert saved[:3] == [100, 200, 300]
    assert saved[-1] == 800
    assert 700 not in saved
    (only,) = queries.generations(stage.history, play.job.id)
    assert (only.facts or {})["every"] == 400
    texts = [one.text for one in queries.job_events(stage.history, play.job.id) if "on a checkpoint every" in one.text]
    assert mentions(texts[1], "next save", "every 400 steps", "before: 100", "1 ms")
    assert len(texts) == 2
