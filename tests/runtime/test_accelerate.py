"""A loop with what Accelerate prepared: batches, accumulation, learning rate and ranks are right after every recovery."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from tests.runtime.chaos import fault
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Workers
from tests.runtime.test_groups_bit_equality import start_hot_spares, taken_over


@pytest.fixture(scope="module")
def accelerated(torch_imported: Path) -> Iterator[Workers]:
    """Give a process that forks workers with Accelerate already imported."""
    server = Workers(torch_imported, "accelerate")
    yield server
    server.close()


@pytest.fixture
def loop(accelerated: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., FlowDouble]]:
    """Give what starts the loop with two ranks on two nodes."""
    made: list[FlowDouble] = []

    def start(*options: str, **more: Any) -> FlowDouble:
        flow = FlowDouble(accelerated, tmp_path_factory.mktemp("f"), "accelerate_loop", UNTIL, *options, ranks=2, stride=1, **more)
        made.append(flow)
        return flow.begin()

    yield start
    for flow in made:
        flow.close()


@pytest.fixture(scope="module")
def whole(accelerated: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Give a run that nothing disturbs, with torch's own groups."""
    flow = FlowDouble(accelerated, tmp_path_factory.mktemp("f"), "accelerate_loop", UNTIL, "stock", ranks=2, stride=1).begin()
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert sorted(ended.losses[0]) == list(range(1, UNTIL + 1))
    flow.close()
    return ended


def assert_equal(flow: FlowDouble, whole: Ended) -> None:
    """Assert equal weights, rates and losses, and that each process was the rank that it had, in every place that knows one."""
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert ended.results == whole.results
    for rank, losses in enumerate(ended.losses):
        assert losses == {step: loss for step, loss in whole.losses[rank].items() if step in losses}
        seen = json.loads((flow.folder / f"seen-{rank}.json").read_text())
        assert seen, "the last process of this rank made no step"
        assert {tuple(one["indices"]) for one in seen} == {(rank,) * 4}
        assert {tuple(one["main"]) for one in seen} == {(rank == 0, True)}


def test_a_failed_step_is_repeated_with_all_its_batches(loop: Callable[..., FlowDouble], whole: Ended) -> None:
    """In the second batch of a step, in the short last step of an epoch, and in the first step of one; rank 0 goes to a hot spare."""
    flow = loop("gate-8", chaos=[fault(1, "backward", 3), fault(0, "backward", 8), fault(1, "forward", 13, generation=2)])
    assert taken_over(flow, 1) == ({"live"}, {2})
    start_hot_spares(flow)
    flow.pass_gate("gate-8")
    assert taken_over(flow, 0, "s0") == ({"live"}, {7})
    assert taken_over(flow, 1) == ({"live"}, {12})
    assert_equal(flow, whole)


def test_a_lost_rank_without_a_place_restarts_the_others(loop: Callable[..., FlowDouble]) -> None:
    """Accelerate has cached the number of ranks: the ranks never say that they divide a step's batch, so the controller restarts all."""
    flow = loop(save=1, chaos=[fault(1, "backward", 6)])
    flow.until_dead(1)
    roles = flow.receive("roles", 0)
    assert not roles.get("copies"), "with copies of the model the controller would shrink the job in its processes"
    flow.ranks = 1
    flow.restart()
    assert flow.receive("resumed", 0, generation=2)["step"] == 5
    assert flow.until(lambda: flow.workers.ended().get(flow.pids[0], -1) == 0, "the end of rank 0")
    seen = json.loads((flow.folder / "seen-0.json").read_text())
    assert seen[0]["step"] == 6
    log = (flow.folder / "rank-0.log").read_text()
    assert "step 5 was saved by 2 ranks and continues on 1: all ranks have started anew" in log
    assert "epoch 2 was divided among 2 ranks, and is read by 1 in another order" in log


def test_with_stock_groups_all_restart_in_the_middle_of_an_epoch(loop: Callable[..., FlowDouble], whole: Ended) -> None:
    """The prepared loader continues after the batches that are done, and accumulates as before."""
    flow = loop("stock", save=1, chaos=[fault(0, "backward", 6)])
    flow.until_dead(0)
    flow.restart()
    assert flow.receive("resumed", 1, generation=2)["step"] == 5
    assert_equal(flow, whole)


def test_what_accelerate_dispatches_from_rank_0_is_refused() -> None:
    """Its position on the other ranks is not known."""
    from accelerate import Accelerator, DataLoaderConfiguration  # type: ignore[import-untyped]  # noqa: PLC0415 (this test alone)

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(torch.arange(8), 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="without dispatch_batches; this is a DataLoaderDispatcher over a Tensor"):
        holdfast.Loader(loader)
    _, optimizer = accelerator.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters()))
    with holdfast.session(model=model, optimizer=optimizer).start() as session:
        assert session.step()
