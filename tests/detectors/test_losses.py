"""What the loss shows: jumps and standstill are seen, and noise, warm-up and what is only reported now and then are not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from holdfast.detectors.evidence import FrozenParameters, LossHistory, NonFiniteLoss
from tests.detectors.evidence_of import seen, the_fault
from tests.mentions import mentions

Curve = Callable[[random.Random, int], float]

CLEAN: dict[str, Curve] = {
    "falling": lambda noise, step: 2.0 + 8.0 * math.exp(-step / 60) + noise.gauss(0.0, 0.05),
    "very noisy": lambda noise, step: 2.5 * math.exp(noise.gauss(0.0, 0.4)) * (1 + 1 / (1 + step / 100)),
    "around nought": lambda noise, _step: noise.gauss(0.0, 1.0),
    "warm restarts": lambda noise, step: 1.5 + 0.3 * abs(math.sin(step / 90)) + noise.gauss(0.0, 0.04),
    "single odd batches": lambda noise, step: (9.0 if step % 97 == 0 else 2.0) + noise.gauss(0.0, 0.05),
    "rising slowly": lambda noise, step: 1.0 + step / 400 + noise.gauss(0.0, 0.05),
    "converged": lambda noise, _step: 1e-6 * math.exp(noise.gauss(0.0, 0.3)),
    "of few values": lambda noise, _step: noise.choice([0.25, 0.5, 0.75, 1.0]),
    "reported every tenth step": lambda _noise, step: 3.0 - (step // 10) * 0.01,
    "reported every hundredth step": lambda _noise, step: 3.0 - (step // 100) * 0.01,
    "constant from the first step": lambda _noise, _step: 1.0,
    "nought": lambda _noise, _step: 0.0,
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_is_never_accused(name: str, seed: int) -> None:
    """Looked at every few steps of a thousand, as the flow does."""
    noise = random.Random(seed)
    curve = [(step, CLEAN[name](noise, step)) for step in range(1, 1001)]
    assert [seen(LossHistory(at=0.0, losses=tuple(curve[max(0, end - 512) : end]))) for end in range(1, 1000, 7)] == [[]] * 143


def run(*tail: float, steps: int = 100, seed: int = 1) -> LossHistory:
    """Return a falling loss that ends in *tail*."""
    noise = random.Random(seed)
    whole = [CLEAN["falling"](noise, step) for step in range(1, steps + 1)] + list(tail)
    return LossHistory(at=9.0, losses=tuple(enumerate(whole, 1)))


def test_a_lasting_spike_is_reported_with_its_first_step() -> None:
    """Three steps in a row; one or two may be an odd batch."""
    assert seen(run(9.0, 9.5)) == []
    fault = the_fault(run(9.0, 9.5, 8.7))
    assert (fault.kind, fault.step) == ("loss-spike", 101)
    assert "to 9.5, since step 101" in fault.quote


def test_a_spike_is_only_upwards() -> None:
    """A loss that falls is what everybody wants."""
    assert seen(run(0.1, 0.1, 0.1)) == []


def test_too_few_losses_say_nothing() -> None:
    """What is usual is not known yet."""
    assert seen(run(90.0, 90.0, 90.0, steps=10)) == []


def test_one_spike_is_one_fault_while_it_lasts() -> None:
    """Once it is what has been usual for long it is reported no more, and the words that distinguish two are those of its begin."""
    signatures = {fault.signature for last in range(3, 9) for fault in seen(run(*[9.0 + place / 100 for place in range(last)]))}
    assert any(mentions(one, "loss-spike", "step 101") for one in signatures)
    assert len(signatures) <= 6
    assert seen(run(*[9.0 + (place % 3) / 10 for place in range(80)])) == []


def test_a_loss_frozen_to_the_bit_is_a_zombie() -> None:
    """After 64 steps, where it had changed at every step before."""
    assert seen(run(*[2.25] * 63)) == []
    fault = the_fault(run(*[2.25] * 64))
    assert (fault.kind, fault.step) == ("training-frozen", 101)
    assert mentions(fault.quote, "2.25", "64 steps", "step 101")


def test_a_loss_with_usual_runs_needs_a_much_longer_run() -> None:
    """Reported every 20 steps: 64 in a row may come, 80 never did."""
    curve = [3.0 - (step // 20) * 0.01 for step in range(200)]
    assert seen(LossHistory(at=0.0, losses=tuple(enumerate([*curve, *[1.0] * 79])))) == []
    assert the_fault(LossHistory(at=0.0, losses=tuple(enumerate([*curve, *[1.0] * 80])))).kind == "training-frozen"


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_reported_with_rank_and_step(loss: float) -> None:
    """And with what there is to go back to."""
    fault = the_fault(
        NonFiniteLoss(node="n1", rank=3, at=5.0, step=77, loss=loss, alone=True, good="the newest checkpoint is that of step 50")
    )
    assert (fault.kind, fault.rank, fault.node, fault.step) == ("loss-not-finite", 3, "n1", 77)
    assert mentions(fault.quote, "step 77", "this rank", "that of step 50")


def test_a_loss_that_does_not_become_a_number_again_is_lost() -> None:
    """Three in a row, after one that was; the first of them is named, however long it lasts. One that never was a number is none."""
    assert seen(run(math.nan, math.inf)) == []
    assert seen(run(math.nan, 1.1, math.nan, math.nan)) == []
    for count in (3, 80):
        fault = the_fault(run(*[math.nan] * count))
        assert (fault.kind, fault.step, fault.signature) == ("loss-diverged", 101, "loss-diverged since step 101")
    assert mentions(fault.quote, "step 101", "step 100")
    assert seen(LossHistory(at=0.0, losses=tuple((step, math.nan) for step in range(200)))) == []


def test_parameters_that_never_change_are_a_zombie() -> None:
    """Two checks may fall into one accumulation of gradients."""
    assert seen(FrozenParameters(at=0.0, node="n0", rank=0, steps=(16, 32))) == []
    fault = the_fault(FrozenParameters(at=0.0, node="n0", rank=0, steps=(16, 32, 48)))
    assert (fault.kind, fault.rank) == ("training-frozen", 0)
    assert mentions(fault.quote, "step 16", "step 48")
