"""Ranks that are lost and not replaced: the others go on in their processes, and every step keeps its samples."""

from __future__ import annotations

import json

import pytest
import torch

from tests.runtime.chaos import fault
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Job, Workers, undisturbed


@pytest.fixture(scope="module")
def fixed(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> FlowDouble:
    """Give a job of three ranks that nothing has disturbed."""
    flow = FlowDouble(workers, tmp_path_factory.mktemp("f"), "micro_batches", UNTIL, ranks=3, stride=1)
    undisturbed(flow)
    return flow


def samples(flow: FlowDouble) -> dict[int, list[list[list[int]]]]:
    """Return what the ranks have computed in each step that counts, rank by rank, share by share."""
    found: dict[int, list[list[list[int]]]] = {}
    for path in sorted(flow.folder.glob("samples-*")):
        for line in path.read_text().splitlines():
            step, computed = json.loads(line)
            found.setdefault(step, []).append(computed)
    return found


def of_steps(flow: FlowDouble) -> dict[int, list[int]]:
    """Return the samples of each step, each as often as it was computed."""
    return {step: sorted(one for rank in ranks for share in rank for one in share) for step, ranks in samples(flow).items()}


def assert_comparable(flow: FlowDouble, fixed: FlowDouble) -> Ended:
    """Check that every step had the samples of a run at full width, and the same loss and parameters but for the order of summation."""
    ended = flow.finish()
    assert ended.status == [0] * len(flow.incarnations), flow.logs()
    assert of_steps(flow) == of_steps(fixed)
    losses = {step: loss for one in ended.losses for step, loss in one.items()}
    assert losses == pytest.approx(fixed.losses()[0], rel=1e-4)
    weights = [json.loads((one.folder / "result-0.json").read_text())["weights"] for one in (flow, fixed)]
    for mine, whole in zip(*weights, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(whole), rtol=1e-3, atol=1e-5)
    return ended


@pytest.mark.parametrize("lost", [2, 0])
def test_two_of_three_ranks_continue_with_the_same_samples(job: Job, fixed: FlowDouble, lost: int) -> None:
    """The last rank, and rank 0 with the store: no process is restarted, and no committed step is lost."""
    flow = job(script="micro_batches", ranks=3, stride=1, chaos=[fault(lost, "backward", 7)])
    left = {rank: pid for rank, pid in flow.pids.items() if rank != lost}
    flow.until_dead(lost)
    flow.shrink([lost])
    assert {(one["source"], one["step"]) for one in flow.mended()} == {("live", 6)}
    assert_comparable(flow, fixed)
    assert {rank: flow.pids[rank] for rank in left} == left
    computed = samples(flow)
    assert {len(computed[step]) for step in range(1, 7)} == {3}
    assert {len(computed[step]) for step in range(7, UNTIL + 1)} == {2}
    assert max(len(share) for step in computed.values() for rank in step for share in rank) <= 6  # a third of 16


def test_a_rank_that_returns_joins_between_two_steps(job: Job, fixed: FlowDouble) -> None:
    """Two of three go on, then a hot spare takes the vacant place while they train: no step is broken off, and each has its samples."""
    flow = job("gate-5", "gate-12", script="micro_batches", ranks=3, stride=1, chaos=[fault(1, "backward", 7)])
    roles = flow.receive("roles")
    assert roles["copies"] == [[0], [1], [2]]
    flow.hot_spare(0, roles["roles"])
    flow.receive("parked", "s0")
    flow.pass_gate("gate-5")
    flow.until_dead(1)
    flow.shrink([1])
    flow.mended()
    flow.grow({1: "s0"})
    flow.prepared()
    for rank in (0, 2):
        flow.receive("beat", rank, step=11)
    flow.may_switch()
    flow.pass_gate("gate-12")
    flow.grown()
    assert_comparable(flow, fixed)
    widths = {step: len(computed) for step, computed in sorted(samples(flow).items())}
    assert widths == {step: 2 if 6 < step < 13 else 3 for step in range(1, UNTIL + 1)}
    assert len(flow.of("regrouped")) == 2, "only the loss of rank 1 made ranks meet"


PIPELINE = ["pipeline_data", "--heads", "2", "--width", "16", "--context", "16", "--bytes", "50000", "--layers", "2", "--microbatches", "2"]


def test_a_pipeline_computes_the_samples_of_one_that_lost_a_stage_until_that_is_back(
    job: Job, workers: Workers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two pipelines of two stages: one loses its last stage, and the other computes all of each step until both stages come again."""
    whole = undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "example", UNTIL, *PIPELINE, "--batch", "4"))
    flow = job(*PIPELINE, "--batch", "4", "gate-5", "gate-12", script="example", chaos=[fault(2, "send", 7)])
    roles = flow.receive("roles")
    assert sorted(roles["copies"]) == [[0, 2], [1, 3]]
    for number, role in enumerate(([0, 1], [2, 3])):
        flow.hot_spare(number, roles["roles"], roles["roles"].index(role))
        flow.receive("parked", f"s{number}")
    stay = {rank: flow.pids[rank] for rank in (1, 3)}
    flow.pass_gate("gate-5")
    flow.until_dead(2)
    flow.shrink([0, 2])
    assert {(one["source"], one["step"]) for one in flow.mended()} == {("live", 6)}
    flow.grow({0: "s0", 2: "s1"})
    flow.prepared()
    for rank in (1, 3):
        flow.receive("beat", rank, step=11)
    flow.may_switch()
    flow.pass_gate("gate-12")
    flow.grown()
    ended = flow.finish()
    assert ended.status == [0] * 4, flow.logs()
    assert {rank: flow.pids[rank] for rank in stay} == stay
    losses = {step: loss for one in ended.losses for step, loss in one.items()}
    assert losses == pytest.approx(whole.losses[0], rel=5e-4)  # Adam amplifies rounding; losses of other samples are 5e-3 apart
    counts = {step: sum(step in one for one in ended.losses) for step in losses}
    assert counts == {step: 2 if 6 < step < 13 else 4 for step in range(1, UNTIL + 1)}
    assert len(flow.of("regrouped")) == 2, "only the loss of a stage made ranks meet"
    for ours, copy in ((0, 1), (2, 3)):
        assert ended.results[ours]["model"] == ended.results[copy]["model"]
        assert ended.results[ours]["moments"] == ended.results[copy]["moments"]


def test_checkpoints_are_written_with_fewer_ranks(job: Job, fixed: FlowDouble) -> None:
    """Rank 0 is lost: the others save by themselves."""
    flow = job(script="micro_batches", ranks=3, stride=1, save=5, chaos=[fault(0, "backward", 7)])
    flow.until_dead(0)
    flow.shrink([0])
    flow.mended()
    assert_comparable(flow, fixed)
    assert max(path.name for path in (flow.folder / "checkpoints").glob("step-*")) == f"step-{UNTIL:08}"
