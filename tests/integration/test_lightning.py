"""Lightning under `holdfast run`: a rank is killed, one is stopped, a node is lost, and the weights are those of plain Lightning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import queries
from tests.integration.stage import Stage

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "runtime" / "scripts" / "lightning_trainer.py"
GATES = (4, 7, 10)
"""Steps before which something breaks: in the middle of an epoch, at the end of the second one, and in the last one."""


def results_in(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks ended with."""
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


def test_a_lightning_job_with_faults_ends_with_the_weights_of_plain_lightning(
    stage: Stage, alone: Callable[..., None], tmp_path: Path
) -> None:
    """Also: a validation and a checkpoint of Lightning that take longer than a hang are none, and the state was only in memory."""
    play = stage.play(
        "lightning",
        script=str(SCRIPT),
        args=[str(stage.home), "slow", *(f"gate-{step}" for step in GATES)],
        nnodes=2,
        nproc_per_node=1,
        spare_nodes=1,
        hot_spares=0,
        env={"OMP_NUM_THREADS": "1"},
        checkpoint={"interval": 0, "memory": {"when_late": "pause", "max_pause": "10s"}},
        timeouts={"hang": "2s"},
    )
    for fault, step in zip((play.chaos.kill, play.chaos.stop, play.chaos.power_off), GATES, strict=True):
        play.steps_to(step - 1)
        fault(1)
        (stage.home / f"gate-{step}").touch()
    assert play.ends() == 0, play.log()
    assert play.kinds() == ["worker-sigkill", "worker-stopped", "node-lost"], play.log()
    assert all(one.steps_lost in {0, 1} for one in play.incidents()[1:]), "from memory: nothing was saved on disk"
    assert len(queries.generations(stage.history, play.job.id)) == 4
    alone(SCRIPT, tmp_path, "plain")
    assert results_in(stage.home) == results_in(tmp_path)
