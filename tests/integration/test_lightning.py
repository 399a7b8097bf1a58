"""Lightning under `holdfast run`: with the callback, faults change no weights; without it, what a restart continues from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import queries
from holdfast.runtime.telemetry.integration_level import RESTART_LIGHTNING
from tests.integration.stage import Stage
from tests.waiting import wait_until

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "runtime" / "scripts" / "lightning_trainer.py"
UNCHANGED = Path(__file__).with_name("lightning_unchanged.py")
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


def steps_in(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return the steps that a rank of the unchanged script began, those of all its processes, in order."""
    file = folder / f"steps-{rank}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("resumes", [False, True])
def test_an_unchanged_lightning_script_continues_from_what_it_loads_and_is_told_so(
    *, resumes: bool, stage: Stage, alone: Callable[..., None], tmp_path: Path
) -> None:
    """Without ``ckpt_path`` it starts over. With it, from its last save (step 12, in epoch 1): the epoch's first batches, other dropout."""
    options = ["resume"] if resumes else []
    play = stage.play(
        f"lightning-unchanged-{'resume' if resumes else 'afresh'}",
        script=str(UNCHANGED),
        args=[str(stage.home), "gate", *options],
        nnodes=1,
        nproc_per_node=2,
        env={"OMP_NUM_THREADS": "1"},
    )
    wait_until(lambda: all(len(steps_in(stage.home, rank)) == 15 for rank in range(2)), seconds=120, explain=play.log)
    play.chaos.kill(1)
    (stage.home / "gate").touch()
    assert play.ends() == 0, play.log()
    assert play.kinds() == ["worker-sigkill"], play.log()
    assert RESTART_LIGHTNING in play.log(), "said where the user looks"
    alone(UNCHANGED, tmp_path, *options)
    undisturbed, disturbed = steps_in(tmp_path), steps_in(stage.home)
    before, after = disturbed[:15], disturbed[15:]
    assert [one["step"] for one in undisturbed] == list(range(30))
    assert before == undisturbed[:15]
    results = [(folder / "weights-0").read_text() for folder in (tmp_path, stage.home)]
    if not resumes:
        assert after == undisturbed
        assert results[0] == results[1]
        return
    assert [one["step"] for one in after] == list(range(12, 30)), "the step's number continues"
    assert [one["batch"] for one in after[:8]] == [one["batch"] for one in undisturbed[10:18]], "and its data is that of the epoch's start"
    assert results[0] != results[1]
