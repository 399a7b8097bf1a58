"""Snapshots of a training on a GPU: copied on a stream of their own into pinned memory, beside what training does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import flush
from holdfast.flush import FlushOrder
from holdfast.runtime import manifest
from holdfast.runtime.flusher.job import Job
from holdfast.runtime.link import Link
from holdfast.runtime.snapshots.checksum import device_sum
from holdfast.runtime.storage import Pace, Reader
from holdfast.runtime.trouble import Teller
from holdfast.vault import CUT, Snapshot, Unusable, labels, word_sum
from tests.runtime.trainer import FIRST, Trainer, opened, restore, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
STEP = FIRST + 2


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close what takes snapshots when a test has ended."""
    yield
    while opened:
        opened.pop().close()


def test_a_snapshot_of_a_gpu_is_the_step_it_names(tmp_path: Path) -> None:
    """Kernels of the next step are under way meanwhile, and the optimizer waits for the copy."""
    trainer = Trainer(tmp_path, device="cuda")
    trainer.to(STEP)
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    other = Trainer(tmp_path / "none", device="cuda")
    assert len(restore(other, tmp_path, STEP)) == 1
    assert same(other.state(), wanted)
    assert not same(trainer.state(), wanted)


@pytest.mark.parametrize("size", [5, 4096, CUT - 3, CUT])
def test_the_device_sums_what_it_holds(size: int) -> None:
    """As the host would."""
    data = torch.randint(0, 256, (size + 3,), dtype=torch.uint8)
    assert int(device_sum(data.cuda()[3:])) % 2**64 == word_sum(data[3:].numpy().tobytes())


def test_a_sum_is_that_of_the_source_and_not_of_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong on the way to the host is found."""
    trainer = Trainer(tmp_path, device="cuda")
    real = torch.Tensor.copy_

    def wrong(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 (torch's)
        return real(to, source.roll(8) if to.device.type == "cpu" and source.is_cuda else source, non_blocking)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", wrong)
        trainer.to(STEP)
    assert labels(tmp_path)
    for path in labels(tmp_path):
        with Snapshot(path) as one, pytest.raises(Unusable, match="was changed in memory"):
            one.verify()


def test_a_checkpoint_is_written_without_the_gpu(tmp_path: Path) -> None:
    """Out of host memory; it is loaded onto the GPU again."""
    trainer = Trainer(tmp_path, device="cuda")
    trainer.to(STEP)
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    (path,) = [path for path, label in labels(tmp_path).items() if label.step == STEP]
    ours = tmp_path / "checkpoints"
    more = {"lineage": 1, "rank": 0, "world": 1, "generation": 1, "directory": str(ours), "keep": 2}
    order = FlushOrder.of({"snapshot": path.name, "step": STEP, **more})
    order.write(tmp_path)
    Job(order, tmp_path, Link(None), Pace(None), Teller()).run()
    assert not flush.orders(tmp_path)
    other = Trainer(tmp_path / "none", device="cuda")
    other.training.load(Reader(manifest.folder_of(ours, STEP)), 0)
    assert same(other.state(), wanted)
