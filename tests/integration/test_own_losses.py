"""The loss that the history has of a step is that of rank 0, whatever becomes of the rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.history import queries
from tests.integration.stage import Stage

SCRIPT = Path(__file__).with_name("own_losses.py")
STEPS, FATAL = 12, 7


@pytest.mark.long  # the parts are tested one by one: the runtime's report, and what the controller records of it
def test_a_step_whose_loss_was_lost_with_rank_0_is_recorded_without_a_loss(stage: Stage) -> None:
    """Rank 0 is killed when all have applied the step and it has not reported it: rank 1 has another loss, which is never the history's."""
    play = stage.play("own-losses", script=str(SCRIPT), args=[str(STEPS), str(FATAL)], nnodes=2, nproc_per_node=1)
    assert play.ends() == 0, play.log()
    incidents = [(one.kind, one.action, one.outcome) for one in play.incidents()]
    assert incidents == [("worker-sigkill", "replace-ranks", "recovered")], play.log()
    rows = queries.curve(stage.history, play.job.id)
    assert [(row.step, row.loss) for row in rows] == [(step, None if step == FATAL else float(step)) for step in range(1, STEPS + 1)]
    assert [row.generation for row in rows] == [1] * (FATAL - 1) + [2] * (STEPS + 1 - FATAL)
