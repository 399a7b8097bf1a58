"""SIGTERM: all ranks exit after the same step, with a complete checkpoint of it."""

from __future__ import annotations

import os
import signal

import pytest

from holdfast.runtime.checkpoint import manifest
from tests.runtime.flow_double import Ended, Job, assert_undisturbed


@pytest.mark.parametrize("signalled", [[2], [0, 1, 2, 3]], ids=["one rank", "all ranks"])
def test_ranks_that_receive_sigterm_save_their_current_step(job: Job, undisturbed_run: Ended, signalled: list[int]) -> None:
    """Whichever rank receives it, the vote informs all; a later start continues from there, bit-equal."""
    flow = job("gate-8", save=100)
    for rank in range(flow.ranks):
        flow.receive("beat", rank, step=7)
    for rank in signalled:
        os.kill(flow.pids[rank], signal.SIGTERM)
    (flow.folder / "gate-8").touch()
    ended = flow.finish()
    assert ended.status == [128 + signal.SIGTERM] * flow.ranks, flow.logs()
    (saved,) = flow.of("saved")
    folder = flow.folder / "checkpoints" / f"step-{saved['step']:08d}"
    assert saved["step"] in (8, 9)
    assert {max(losses) for losses in ended.losses} == {saved["step"]}
    assert manifest.looks_complete(folder)
    assert flow.of("finished") == []
    flow.restart()
    assert {flow.receive("resumed", rank, generation=2)["step"] for rank in range(flow.ranks)} == {saved["step"]}
    assert_undisturbed(flow, undisturbed_run)


def test_a_rank_lost_in_the_final_save_leaves_the_checkpoint_before(job: Job, undisturbed_run: Ended) -> None:
    """Complete or not at all: the others wait for the controller, which has them stop or continue."""
    flow = job("gate-8", save=5, chaos=[{"rank": 1, "at": "saving", "step": 8, "do": "kill", "generation": 1}])
    for rank in range(flow.ranks):
        flow.receive("beat", rank, step=7)
    os.kill(flow.pids[3], signal.SIGTERM)
    (flow.folder / "gate-8").touch()
    flow.until_dead(1)
    assert [path.name for path in manifest.candidates(flow.folder / "checkpoints")] == ["step-00000005"]
    flow.restart()
    assert {flow.receive("resumed", rank, generation=2)["step"] for rank in range(flow.ranks)} == {5}
    assert_undisturbed(flow, undisturbed_run)
