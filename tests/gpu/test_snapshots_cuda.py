"""Snapshots of a training on a GPU: copied on a stream of their own into pinned memory, beside what training does.

What is claimed of a GPU is tried on the processor too: a test that nobody here can run must not grow old unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.memstore import write_requests
from holdfast.memstore.shared_memory import labels
from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.agent_client import AgentLink
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.storage import CheckpointReader, WriteRate
from holdfast.runtime.checkpoint.storage_errors import StorageErrorReporter
from holdfast.runtime.checkpoint_writer.service import WriteTask
from holdfast.runtime.snapshots.device_runtime import CapturedStep, CudaRuntime
from tests.runtime.counting_device import CountingRuntime
from tests.runtime.trainer import FIRST, Trainer, opened, restore, same, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize(
        "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"))]
    ),
]
STEP = FIRST + 2


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close what takes snapshots when a test has ended."""
    yield
    while opened:
        opened.pop().close()


def test_a_snapshot_of_a_gpu_is_the_step_it_names(tmp_path: Path, device: str) -> None:
    """Kernels of the next step are under way meanwhile, and the optimizer waits for the copy."""
    trainer = Trainer(tmp_path, device=device)
    trainer.to(STEP)
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    other = Trainer(tmp_path / "none", device=device)
    assert len(restore(other, tmp_path, STEP)) == 1
    assert same(other.state(), wanted)
    assert not same(trainer.state(), wanted)


def test_memory_that_cannot_be_pinned_costs_no_snapshot(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies hold up training then. On a card the driver is given an address that it refuses, and no later call fails for it."""
    runtime: Any = CountingRuntime(refuses=True) if device == "cpu" else CudaRuntime(torch.device(device, 0))
    if device != "cpu":
        monkeypatch.setattr(runtime, "register", lambda _address, size: CudaRuntime.register(runtime, 0, size))
    trainer = Trainer(tmp_path, device=device, runtime=runtime)
    trainer.to(STEP + 2)
    counts = trainer.snapshotter.counts
    assert counts.given_up == 0
    assert counts.taken >= 3  # one in each slot


def test_a_checkpoint_is_written_without_the_gpu(tmp_path: Path, device: str) -> None:
    """Out of host memory; it is loaded onto the GPU again."""
    trainer = Trainer(tmp_path, device=device)
    trainer.to(STEP)
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    (path,) = [path for path, label in labels(tmp_path).items() if label.step == STEP]
    ours = tmp_path / "checkpoints"
    more = {"lineage": 1, "rank": 0, "world": 1, "generation": 1, "directory": str(ours), "keep": 2}
    order = WriteRequest.of({"snapshot": path.name, "step": STEP, **more})
    order.write(tmp_path)
    WriteTask(order, tmp_path, AgentLink(None), WriteRate(None), StorageErrorReporter()).run()
    assert not write_requests.pending(tmp_path)
    other = Trainer(tmp_path / "none", device=device)
    other.training.load(CheckpointReader(manifest.folder_of(ours, STEP)), 0)
    assert same(other.state(), wanted)


def test_a_step_in_a_graph_is_refused(tmp_path: Path, device: str) -> None:
    """A real graph on a card. Nothing has changed, and snapshots go on."""
    runtime = CountingRuntime() if device == "cpu" else None
    trainer = Trainer(tmp_path, device=device, runtime=runtime)
    trainer.to(STEP)
    trainer.begin()
    before, number = trainer.state(), torch.ones(1, device=device)
    if runtime is None:
        captured: AbstractContextManager[Any] = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    else:
        captured = nullcontext()
        runtime.capturing = True
    with captured:
        number += 1  # torch warns of an empty graph
        with pytest.raises(CapturedStep):
            trainer.optimizer.step()
    if runtime is not None:
        runtime.capturing = False
    assert same(trainer.state(), before)
    trainer.end()
    trainer.to(STEP + 2)
    assert STEP + 1 in stored(tmp_path)
