"""Verification that a checkpoint, or the snapshots of one step, belong together: whatever does not is found and reported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.runtime.checkpoint_verifier.__main__ import findings, main
from holdfast.runtime.state import tree
from tests.mentions import mentions
from tests.runtime.damage import biggest, flip_a_bit
from tests.runtime.ranks import ROOT, Ranks
from tests.runtime.saved_run import STEP, Change, Made, make, reseal, rewrite


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def original(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Provide what two ranks have saved, copies of each other or sharded."""
    return make(ranks, tmp_path_factory.mktemp("made"), wrap=request.param)


@pytest.fixture
def made(original: Made, tmp_path: Path) -> Made:
    """Give a copy to damage."""
    return original.copied(tmp_path)


def disk(made: Made) -> dict[str, list[str]]:
    """Verify the checkpoint."""
    return asdict(findings({"disk": str(made.checkpoint)}))


def memory(made: Made, *, twin: bool = False) -> dict[str, list[str]]:
    """Verify the snapshots, and compare them with the checkpoint of the same step."""
    files = [str(path) for path in made.snapshots()]
    return asdict(findings({"disk": str(made.checkpoint) if twin else None, "memory": files, "world": 2}))


def broken_by(made: Made, change: Change) -> str:
    """Return what a verification finds broken after a change that no digest shows."""
    rewrite(made.checkpoint, change)
    return "\n".join(disk(made)["broken"])


def test_an_unchanged_checkpoint_is_proven(made: Made) -> None:
    """The disk, the memory, and both compared; what cannot be proven is listed."""
    reported = disk(made)
    assert reported["broken"] == []
    assert any(mentions(line, "progress", f"step {STEP}") for line in reported["proven"])
    assert any(mentions(line, "optimizer.0", STEP) for line in reported["proven"])
    assert any(mentions(line, "random generators", "2 ranks") for line in reported["proven"])
    assert any(mentions(line, "positions", "epoch") for line in reported["proven"])
    assert any(mentions(line, "tensors", "step number") for line in reported["unproven"])
    both = memory(made, twin=True)
    assert both["broken"] == []
    assert any(mentions(line, "checkpoint", f"step {STEP}", "snapshots", "equal to the bit") for line in both["proven"])
    assert any(mentions(line, "random generators", "memory", "disk") for line in both["proven"])


def test_rewriting_without_a_change_passes(made: Made) -> None:
    """So what the other tests find is their change, not the way it was made."""
    assert broken_by(made, lambda _tensors, _trees: None) == ""
    for path in made.snapshots():
        reseal(path, lambda _data, _blobs, _label: None)
    assert memory(made, twin=True)["broken"] == []


def moment(tensors: dict[str, torch.Tensor]) -> str:
    """Return the key of some moment of the optimizer."""
    return next(key for key in sorted(tensors) if key.endswith(".exp_avg"))


CHANGES: dict[str, tuple[Change, str]] = {
    "a rank's tree of another step": (
        lambda _, trees: trees[1]["progress"].update(step=4),
        f"the tree of rank 1 is of step 4, the manifest of step {STEP}",
    ),
    "a missing tree": (lambda _, trees: trees.pop(1), "the tree of rank 1 cannot be read: it is missing"),
    "a rank elsewhere in the data": (lambda _, trees: trees[1]["data"].update(consumed=1), "the position in the data of rank"),
    "another epoch": (lambda _, trees: trees[0]["data"].update(epoch=9), "the position in the data of rank"),
    "no generators": (lambda _, trees: trees[1].update(rng=None), "the random generators of rank 1 are missing"),
    "empty generators": (
        lambda _, trees: trees[0]["rng"].update(torch=torch.zeros(0, dtype=torch.uint8)),
        "generators of rank 0 are missing",
    ),
    "a scheduler elsewhere": (lambda _, trees: trees[1]["schedulers"][0].update(last_epoch=3), "the schedulers' last_epoch of rank"),
    "a tensor of NaN": (lambda tensors, _: tensors[moment(tensors)].fill_(torch.nan), "is filled with NaN"),
    "a tensor that is not there": (lambda tensors, _: tensors.pop(moment(tensors)), "named in the tree of rank 0, is missing"),
    "a tensor too many": (lambda tensors, _: tensors.update({"model.strange": torch.ones(3)}), "'model.strange' is stored but not named"),
    "a moment in another shape": (
        lambda tensors, _: tensors.update({moment(tensors): torch.ones(2, 3)}),
        "has the shape (2, 3), and its parameter",
    ),
    "an empty moment": (lambda tensors, _: tensors.update({moment(tensors): torch.ones(0)}), "is empty"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_does_not_match_is_reported(made: Made, case: str) -> None:
    """The checkpoint's digests are right, so that nothing else would notice."""
    change, words = CHANGES[case]
    assert words in broken_by(made, change)


def test_counters_that_differ_between_ranks_are_reported(made: Made) -> None:
    """Rank 1 has applied 7 steps of one parameter, according to its counter."""

    def change(tensors: dict[str, torch.Tensor], trees: dict[int, Any]) -> None:
        name, state = next(iter(trees[1]["optimizers"][0]["state"].items()))
        assert isinstance(state["step"], torch.Tensor)
        state["step"] = torch.tensor(7.0)
        assert name
        assert tensors

    assert mentions(broken_by(made, change).partition("rank 1")[2], "7.0", "11.0")


def test_a_counter_that_differs_from_the_others_is_unproven(made: Made) -> None:
    """It may be correct, where a parameter had no gradient: it is listed as unproven."""

    def change(tensors: dict[str, torch.Tensor], trees: dict[int, Any]) -> None:
        for state_tree in trees.values():
            state = next(iter(state_tree["optimizers"][0]["state"].values()))
            if isinstance(state["step"], torch.Tensor):
                state["step"] = torch.tensor(7.0)
            else:
                tensors[next(iter(state["step"].values()))].fill_(7.0)

    assert broken_by(made, change) == ""
    assert any(mentions(line, "optimizer.0", 11, 7) for line in disk(made)["unproven"])


def relight(change: Callable[[dict[str, Any]], object]) -> Callable[[bytearray, dict[str, bytes], dict[str, Any]], None]:
    """Return a change to a rank's own state in a snapshot."""

    def act(_data: bytearray, blobs: dict[str, bytes], _label: dict[str, Any]) -> None:
        rank_state = tree.unpickled(blobs["rank_state"])
        change(rank_state)
        blobs["rank_state"] = tree.pickled(rank_state)

    return act


SNAPSHOTS: dict[str, tuple[Callable[[bytearray, dict[str, bytes], dict[str, Any]], object], str]] = {
    "another step": (lambda _data, _blobs, label: label.update(step=10), "the snapshots are of several steps or lineages"),
    "another lineage": (lambda _data, _blobs, label: label.update(lineage=3), "the snapshots are of several steps or lineages"),
    "no own state": (lambda _data, blobs, _label: blobs.pop("rank_state"), "'rank_state' of rank 1 cannot be read: KeyError"),
    "an outline that is none": (lambda _data, blobs, _label: blobs.update(static=b"qx"), "'static' of rank 1 cannot be read"),
    "small values that are none": (lambda _data, blobs, _label: blobs.update(dynamic=b""), "'dynamic' of rank 1 cannot be read"),
    "elsewhere in the data": (relight(lambda rank_state: rank_state["data"].update(consumed=1)), "the position in the data of rank"),
    "no generators": (relight(lambda rank_state: rank_state.update(rng={})), "the random generators of rank 1 are missing"),
}


@pytest.mark.parametrize("case", SNAPSHOTS)
def test_snapshots_that_do_not_match_are_reported(made: Made, case: str) -> None:
    """Their sums are right."""
    change, words = SNAPSHOTS[case]
    files = made.snapshots()
    reseal(files[1], change)
    reported = findings({"memory": [str(path) for path in files], "world": 2})
    assert words in "\n".join(reported.broken)


def test_a_missing_rank_is_reported(made: Made) -> None:
    """Its per-rank state is missing, and what only it had of a shard."""
    first, _ = made.snapshots()
    broken = "\n".join(findings({"memory": [str(first)], "world": 2}).broken)
    assert mentions(broken, "per-rank state of rank 1")


def test_a_tampered_tensor_in_memory_is_found_by_comparing(made: Made) -> None:
    """One bit of one tensor, the sums made right again: by itself each tier passes, together they do not."""
    reseal(made.snapshots()[0], lambda data, _blobs, _label: data.__setitem__(5, data[5] ^ 1))
    assert memory(made)["broken"] == []
    assert disk(made)["broken"] == []
    broken = "\n".join(memory(made, twin=True)["broken"])
    assert "'model.0.weight'" in broken


def test_a_tampered_tensor_on_the_disk_is_found_by_comparing(made: Made) -> None:
    """The other way round."""

    def change(tensors: dict[str, torch.Tensor], _trees: object) -> None:
        tensors[moment(tensors)].view(-1)[0] += 1

    assert broken_by(made, change) == ""
    broken = memory(made, twin=True)["broken"]
    assert broken
    assert all(".exp_avg'" in line for line in broken)


def test_the_command_prints_its_findings(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0 and what is proven; status 1 and what is broken."""
    folder = str(made.checkpoint)
    assert main([folder]) == 0
    assert "BROKEN" not in capsys.readouterr().out
    file = biggest(made.checkpoint)
    flip_a_bit(file)
    assert main([folder]) == 1
    assert f"BROKEN: {file.name} was changed" in capsys.readouterr().out


@pytest.mark.parametrize("original", ["ddp"], indirect=True)
def test_it_is_a_program(original: Made) -> None:
    """`python -m holdfast.runtime.checkpoint_verifier FOLDER`, without a word of torch's own."""
    command = [sys.executable, "-m", "holdfast.runtime.checkpoint_verifier", str(original.checkpoint)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "BROKEN" in done.stdout, done.stderr) == (0, False, "")
    assert mentions(done.stdout, "proven", "progress of every rank")
