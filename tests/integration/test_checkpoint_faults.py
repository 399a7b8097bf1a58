"""Checkpoints that cannot be written or are not what was written: training goes on, and resumes from the newest whole one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import exit_codes
from holdfast.history import queries
from holdfast.runtime.checkpoint import manifest
from tests.integration.stage import Stage
from tests.waiting import wait_until

SCRIPT = str(Path(__file__).parents[2] / "examples" / "byte_gpt.py")
GATED = str(Path(__file__).with_name("gated.py"))
SMALL = ["--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "2", "--bytes", "100000"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a real file system of 300 kB: one checkpoint of this model fits, three do not."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)], check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system needs root: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.long  # in the runtime: tests/runtime/test_save.py
def test_a_full_disk_costs_checkpoints_and_not_the_training(stage: Stage, small_disk: Path) -> None:
    """Each is reported once, with the cure, and no incident is made of it. That the end is not saved is in the exit status."""
    plan = {"interval": 5, "directory": str(small_disk)}
    play = stage.play("full", script=SCRIPT, args=["--steps", "40", *SMALL], nnodes=2, nproc_per_node=1, checkpoint=plan)
    assert play.ends() == exit_codes.NOT_SAVED, play.log()
    assert play.state() == "COMPLETED"
    assert play.kinds() == []
    faults = [one.kind for one in queries.faults(stage.history, play.job.id)]
    assert "checkpoint-disk-full" in faults
    assert any("free space" in remark.text for remark in queries.job_events(stage.history, play.job.id))
    assert queries.last_step(stage.history, play.job.id).step == 40  # type: ignore[union-attr]


def flip(checkpoint: Path) -> None:
    """Flip a bit of what one rank has written."""
    data = next(checkpoint.glob("*.distcp"))
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)


@pytest.mark.long
def test_a_flipped_bit_in_the_newest_checkpoint_sends_the_job_to_the_one_before(stage: Stage, alone: Callable[..., None]) -> None:
    """`torch.load` would take it without a word; the job ends with the parameters of an undisturbed run all the same, to the bit."""
    nodes: dict[str, Any] = {"nnodes": 2, "nproc_per_node": 1}
    folder = stage.home / "ckpt"
    plan = {
        "interval": 5,
        "keep": 4,
        "directory": str(folder),
        "memory": {"interval": 0},
    }  # with state in memory no checkpoint would be needed
    args = ["--steps", "40", "--stock-groups", *SMALL]  # with managed groups no checkpoint would be needed
    results = [stage.home / "flipped.json", stage.home / "calm.json"]
    given = [str(stage.home), "18", "byte_gpt.py", *args, "--result", str(results[0])]
    play = stage.play("flipped", script=GATED, args=given, **nodes, checkpoint=plan, env={"OMP_NUM_THREADS": "1"})
    play.steps_to(12)
    play.chaos.stop(1)  # no further one is begun, but the one in work may come to its end
    flipped = dict[int, Path]()

    def flip_newest() -> bool:
        newest = manifest.candidates(folder)[0]
        if (step := manifest.step_of(newest)) not in flipped:
            flipped[step] = newest
            flip(newest)
        return play.saw(1)

    wait_until(flip_newest, seconds=60, explain=play.log)
    (stage.home / "gate-18").touch()
    assert play.ends() == 0, play.log()
    assert play.kinds() == ["worker-stopped"]
    corrupt = [one for one in queries.faults(stage.history, play.job.id) if one.kind == "checkpoint-corrupt"]
    assert corrupt
    assert flipped[max(flipped)].name in corrupt[0].evidence["quote"]
    assert play.incidents()[0].resumed_step == min(flipped) - 5

    assert [row.step for row in queries.curve(stage.history, play.job.id)] == list(range(1, 41))
    alone(SCRIPT, *args, "--result", results[1])
    assert results[0].read_text() == results[1].read_text()
