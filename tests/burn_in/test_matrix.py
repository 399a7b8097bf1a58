"""Products of matrices and patterns in a device's memory: real torch, on processors where there is no GPU, with wrong answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.detectors.nodes.burn_in_results import CheckMark
from holdfast.probe.burn_in.checks import matrix
from tests.mentions import mentions

CPU = torch.device("cpu")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products and patterns take next to no time."""
    monkeypatch.setattr(matrix, "LARGE", 64)
    monkeypatch.setattr(matrix, "CHUNK", 1 << 16)


def found() -> dict[str, Any]:
    """Return what is known of a device before it worked."""
    return {"figures": {}, "products": []}


def test_products_on_the_cpu_equal_those_in_integers() -> None:
    """With real torch."""
    result = matrix.matrix(0.01)
    assert (result.mark, result.needed) == (CheckMark.PASSED, True)
    assert result.figures["rounds"] >= 1


@pytest.mark.usefixtures("_small")
def test_a_healthy_device_passes_with_its_speed() -> None:
    """All measurements are present."""
    one = found()
    assert matrix.multiply(torch, CPU, time.monotonic() + 0.02, one) == ""
    assert matrix.fill(torch, CPU, time.monotonic(), 1 << 18, one) == ""
    assert set(one["figures"]) == {"float32 TFLOP/s", "bfloat16 TFLOP/s", "GPU MiB", "passes"}
    assert one["figures"]["GPU MiB"] == pytest.approx(0.25)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("wrong", "words"), [(1, "whole numbers"), (4, "product 2 in float32 differs in 1 place from")])
def test_one_wrong_product_is_found(wrong: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is compared with integers, each later one with the first."""
    calls = iter(range(1, 10**9))

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made = a @ b
        made[3, 5] += next(calls) == wrong
        return made

    monkeypatch.setattr(matrix, "_product", product)
    assert words in matrix.multiply(torch, CPU, time.monotonic() + 60, found())


@pytest.mark.usefixtures("_small")
def test_a_stuck_bit_in_a_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second pattern has it the other way."""

    def write(part: torch.Tensor, values: torch.Tensor) -> None:
        part.copy_(values)
        part[77] |= 1 << 40

    monkeypatch.setattr(matrix, "_write", write)
    assert mentions(matrix.fill(torch, CPU, time.monotonic() + 60, 1 << 18, found()) or "", 4, "memory")


def burnt(number: int, *, speed: float = 50.0, value: float = 1.0, wrong: str = "") -> dict[str, Any]:
    """Return what burning one GPU came to."""
    product = torch.full((2, 2), value)
    facts = {"seconds": 1.0, "figures": {"float32 TFLOP/s": speed}, "devices": (f"0000:{number:02x}:00.0",)}
    return {"number": number, "name": "H200", "wrong": wrong, "products": [product], **facts}


def test_gpus_of_one_kind_are_compared_with_each_other() -> None:
    """One with other results, one that is slow, one that failed by itself, and one that torch does not see."""
    checks = matrix._compared([burnt(0), burnt(1, value=2.0), burnt(2), burnt(3, speed=30.0), burnt(4, wrong="lost")], missing=1)
    assert [one.mark for one in checks] == [
        CheckMark.PASSED,
        CheckMark.FAILED,
        CheckMark.PASSED,
        CheckMark.FAILED,
        CheckMark.FAILED,
        CheckMark.SKIPPED,
    ]
    assert checks[2].devices == ("0000:02:00.0",)
    assert mentions(checks[1].words, "GPUs [0, 2, 3]")
    assert mentions(checks[3].words, "30.0 float32 TFLOP/s", "50.0")


def test_a_node_without_gpus_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a GPU, and no torch to test it, may not pass."""
    monkeypatch.setattr(Path, "glob", lambda *_: iter([]))
    (none,) = matrix.gpu(0.1, 0.5)
    assert (none.mark, none.needed) == (CheckMark.SKIPPED, False)
    (gone,) = matrix.gpu(0.1, 0.5, expected=8)
    assert (gone.mark, gone.needed) == (CheckMark.SKIPPED, True)
    assert mentions(gone.words, 8)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(["/dev/nvidia0"]))
    (few,) = matrix.gpu(0.1, 0.5, expected=8)
    assert few.mark is CheckMark.FAILED
    assert mentions(few.words, 1, 8)
    monkeypatch.setattr(matrix, "_torch", lambda: "its python3 has no torch")
    (blind,) = matrix.gpu(0.1, 0.5)
    assert (blind.mark, blind.needed) == (CheckMark.SKIPPED, True)
    assert mentions(blind.words, 1, "python3", "torch")
