"""Checksums of snapshots on a real GPU: made by the device, of what it holds and not of what came to the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.memstore.shared_memory import SLICE_BYTES, Snapshot, UnusableSnapshot, labels, word_sum
from holdfast.runtime.snapshots.checksum import device_sums
from tests.runtime.trainer import FIRST, Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
STEP = FIRST + 2


@pytest.mark.parametrize("size", [5, 4096, SLICE_BYTES - 3, SLICE_BYTES])
def test_the_device_sums_what_it_holds(size: int) -> None:
    """As the host would."""
    data = torch.randint(0, 256, (size + 3,), dtype=torch.uint8)
    padded = torch.nn.functional.pad(data.cuda()[3:], (0, SLICE_BYTES - size))
    assert int(device_sums(padded)) % 2**64 == word_sum(data[3:].numpy().tobytes())


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
        with Snapshot(path) as one, pytest.raises(UnusableSnapshot, match="changed in memory"):
            one.verify()
