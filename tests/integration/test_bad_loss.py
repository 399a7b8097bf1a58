"""A batch that spoils the parameters: the job goes back with the same data, then without it, and ends as if it had never been."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.history import queries
from tests.integration.stage import Stage

SCRIPT = Path(__file__).with_name("spoiled.py")
STEPS, BAD = 90, 31


@pytest.mark.long
def test_a_batch_that_is_no_number_is_tried_twice_and_then_left_out(stage: Stage, alone: Callable[..., None], tmp_path: Path) -> None:
    """Nothing that was made of it is gone on from, in memory or on disk; the end is bit-equal to a run that never saw it."""
    results = tmp_path / "calm.json", tmp_path / "broken.json"
    alone(SCRIPT, "--steps", STEPS, "--bad", BAD - 1, "--skip", f"{BAD - 1},{BAD}", "--pace", 0, "--result", results[0])
    play = stage.play(
        "spoiled",
        script=str(SCRIPT),
        args=["--steps", str(STEPS), "--bad", str(BAD - 1), "--result", str(results[1])],
        nnodes=2,
        nproc_per_node=1,
        checkpoint={"interval": 5, "memory": {"interval": 1}},
    )
    assert play.ends() == 0, play.log()
    assert [(one.kind, one.action, one.outcome) for one in play.incidents()] == [("loss-diverged", "rollback", "recovered")] * 2
    same, without = (one.act for one in queries.decisions(stage.history, play.job.id))
    assert (same["before"], same["skip"]) == (BAD - 1, [])
    assert (without["before"], without["skip"]) == (BAD - 1, [BAD - 1, BAD])
    assert all(one.resumed_step is not None and one.resumed_step < BAD - 1 for one in play.incidents())
    ended = json.loads(results[1].read_text())
    assert ended == json.loads(results[0].read_text())
    assert ended[2] == STEPS + 2, "two batches were passed over"
