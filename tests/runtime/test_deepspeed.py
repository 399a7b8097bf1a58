"""DeepSpeed's ZeRO under Holdfast: it resumes from its own checkpoint, with groups of either kind, and refuses another number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.host.ports import free_port
from tests.frameworks import needs
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Workers
from tests.runtime.ranks import ROOT

needs("deepspeed")


def run(workers: Workers, folder: Path, stage: int, *, chaos: list[dict[str, Any]], groups: str) -> tuple[FlowDouble, Ended]:
    """Train with a stage of ZeRO on two ranks, through the faults, with groups of one kind."""
    flow = FlowDouble(workers, folder, "saves_itself", "deepspeed", stage, ranks=2, stride=1, chaos=chaos, groups=groups).begin()
    for _ in chaos:
        flow.until_dead(1)
        assert flow.receive("exception", 0)["peer_lost"]
        flow.restart()
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert not flow.of("groups"), "no rank says that it can be repaired"
    assert {one["name"] for one in flow.of("section")} == {"checkpoint of DeepSpeed"}
    (level,) = {(one["level"], one["text"]) for one in flow.of("level")}
    assert level[0] == "unchanged"
    assert "after a fault all ranks restart from the checkpoint that it loads itself" in level[1]
    return flow, ended


@pytest.fixture(scope="module")
def workers(torch_imported: Path) -> Iterator[Workers]:
    """Give a process that forks workers with DeepSpeed already imported."""
    server = Workers(torch_imported, "examples.deepspeed_zero")
    yield server
    server.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_resumes_bit_equal_and_refuses_fewer_ranks(workers: Workers, tmp_path_factory: pytest.TempPathFactory, stage: int) -> None:
    """A killed rank, in managed groups, against a calm run in PyTorch's own: its checkpoint is complete, and steps are reported."""
    calm, whole = run(workers, tmp_path_factory.mktemp("f"), stage, chaos=[], groups="auto")
    flow, ended = run(workers, tmp_path_factory.mktemp("f"), stage, chaos=[fault(1, "begin", 8)], groups="managed")
    assert "resumed after step 6" in flow.logs()
    assert (ended.results, ended.losses) == (whole.results, whole.losses)
    assert sorted(whole.losses[0]) == list(range(1, 11))
    flow.ranks = 1
    flow.restart()
    assert flow.until(lambda: flow.workers.ended().get(flow.pids[0]), "the end of rank 0") == 1
    refused = "The checkpoint being loaded used a DP world size of 2 but the current world size is 1"
    assert refused in flow.receive("exception", 0)["message"]
    for one in (calm, flow):
        one.close()


def test_a_session_refuses_zero_in_a_sentence(tmp_path: Path) -> None:
    """The optimizer of ZeRO is none of PyTorch's."""
    script = """
import deepspeed, torch, holdfast
deepspeed.ops.__compatible_ops__.clear()
adam = {"type": "AdamW", "params": {"torch_adam": True}}
for stage in 1, 2, 3:
    model = torch.nn.Linear(2, 2)
    zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": adam}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=zero)
    try:
        holdfast.session(model=engine.module, optimizer=optimizer)
    except TypeError as error:
        print("refused:", error)
"""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = {**os.environ, **ranks, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=words, capture_output=True, text=True, check=False)
    assert [one for one in done.stdout.splitlines() if one.startswith("refused:")] == [
        f"refused: session(optimizer=...) got DeepSpeed's {optimizer}, which keeps its state in parts of its own: report steps "
        "by holdfast.heartbeat(engine.global_steps, loss), and save by engine.save_checkpoint"
        for optimizer in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
    ], done.stderr
