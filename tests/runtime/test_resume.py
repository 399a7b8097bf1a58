"""A resumed run is the run that was never interrupted, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.damage import names
from tests.runtime.ranks import Ranks


def interrupted(ranks: Ranks, count: int, directory: Path, **arguments: Any) -> list[dict[str, Any]]:
    """Run until a kill after step 10, and again from the checkpoint of step 8; return the result of the second run."""
    ended = ranks.start("train", count, directory=directory, dies_after=10, **arguments).wait()
    assert any(one.status == -9 for one in ended), ended
    return ranks.run("train", count, directory=directory, **arguments)


@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (1, {}),
        (1, {"workers": 2}),
        (1, {"until": 40}),
        (1, {"until": 40, "endless": False}),
        (2, {"kind": "norm"}),
        (2, {"wrap": "fsdp"}),
        (4, {"until": 40}),
        (4, {"workers": 1, "kind": "norm"}),
    ],
    ids=lambda value: ",".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else f"{value} ranks",
)
def test_a_resumed_run_gives_the_losses_of_an_undisturbed_one(ranks: Ranks, tmp_path: Path, count: int, arguments: dict[str, Any]) -> None:
    """Losses, parameters, buffers and position are equal to the bit on every rank, dropout, noise and shuffling included."""
    undisturbed = ranks.run("train", count, directory=tmp_path / "a", **arguments)
    resumed = interrupted(ranks, count, tmp_path / "b", **arguments)
    for whole, second in zip(undisturbed, resumed, strict=True):
        assert second["began"] == 8
        assert second["resumed_from"] == "step-00000008"
        assert second["losses"] == {step: loss for step, loss in whole["losses"].items() if int(step) > 8}
        assert (second["model"], second["position"]) == (whole["model"], whole["position"])


@pytest.mark.long
def test_without_stabilize_ddp_a_restart_changes_the_last_bits(ranks: Ranks, tmp_path: Path) -> None:
    """DDP that sorts its buckets after the first step is the reason for `stabilize_ddp`; when this fails, torch has mended it."""
    undisturbed = ranks.run("train", 4, directory=tmp_path / "a", until=40, settle=False)[0]["losses"]
    resumed = interrupted(ranks, 4, tmp_path / "b", until=40, settle=False)[0]["losses"]
    assert resumed != {step: undisturbed[step] for step in resumed}
    assert resumed == {step: pytest.approx(undisturbed[step], rel=1e-4) for step in resumed}


def test_a_checkpoint_of_a_wrapped_model_is_one_of_the_plain_model(ranks: Ranks, tmp_path: Path) -> None:
    """Two DDP ranks save, one process without DDP or group loads, and the other way round."""
    two = ranks.run("train", 2, directory=tmp_path, until=4)
    one = ranks.run("train", 1, directory=tmp_path, until=4)
    assert (one[0]["began"], one[0]["model"]) == (4, two[0]["model"])
    one = ranks.run("train", 1, directory=tmp_path, until=8)
    two = ranks.run("train", 2, directory=tmp_path, until=8)
    assert [rank["model"] for rank in two] == [one[0]["model"]] * 2


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("wrap", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_another_number_of_ranks_resumes_with_the_same_model(ranks: Ranks, tmp_path: Path, wrap: str, before: int, after: int) -> None:
    """Parameters are complete after the change, and the data continues after as many samples over all ranks."""
    first = ranks.run("train", before, directory=tmp_path, until=2, every=2, wrap=wrap)
    loaded = ranks.run("train", after, directory=tmp_path, until=2, every=2, wrap=wrap)
    assert [rank["model"] for rank in loaded] == [first[0]["model"]] * after
    assert [rank["position"] for rank in loaded] == [[0, 2 * before // after]] * after
    on = ranks.run("train", after, directory=tmp_path, until=4, every=2, wrap=wrap)
    assert [rank["began"] for rank in on] == [2] * after
    assert len({rank["model"] for rank in on}) == 1


def test_moments_wider_than_weights_are_restored(ranks: Ranks, tmp_path: Path) -> None:
    """The load_state_dict of torch would cast float32 moments of bfloat16 weights down."""
    results = ranks.run("half_precision", directory=tmp_path)[0]
    assert results["saved"][0] == "torch.float32"
    assert results["restored"] == results["saved"]


@pytest.mark.long
def test_training_that_is_done_stays_done(ranks: Ranks, tmp_path: Path) -> None:
    """Started once more, a finished run does no step and returns the same result."""
    first = ranks.run("train", 2, directory=tmp_path)
    again = ranks.run("train", 2, directory=tmp_path)
    assert [rank["losses"] for rank in again] == [{}, {}]
    assert [rank["model"] for rank in again] == [rank["model"] for rank in first]
    assert names(tmp_path) == ["step-00000008", "step-00000012"]
