"""The burn-in on real GPUs: all products are the same, and memory keeps what is written to it."""

from __future__ import annotations

import pytest
import torch

from holdfast.detectors.nodes.burn_in_results import CheckMark
from holdfast.probe.burn_in.checks import matrix

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_sound_gpus_pass() -> None:
    """Each reports its speed and how much of its memory was tried."""
    checks = matrix.gpu(4.0, 0.2)
    assert [one.mark for one in checks] == [CheckMark.PASSED] * torch.cuda.device_count(), checks
    assert all(one.figures["bfloat16 TFLOP/s"] > 1 for one in checks)
