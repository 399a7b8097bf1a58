"""The newest checkpoint of a job that is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoints.inventory import latest
from holdfast.errors import NoCheckpoint
from tests.runtime.damage import biggest, cut, flip_a_bit
from tests.workflows.conftest import Save


def test_the_newest_checkpoint_is_found_and_verified(save: Save, tmp_path: Path) -> None:
    """Its path, its step, and that every byte was read."""
    save(tmp_path, 50)
    newest = save(tmp_path, 100)
    found = latest(tmp_path, "gpt")
    assert (found.job, found.path, found.step, found.world_size, found.verified) == ("gpt", newest, 100, 1, True)
    assert found.rejected == ()
    assert found.bytes == sum(path.stat().st_size for path in newest.iterdir() if path.name != "manifest.json")


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(save: Save, tmp_path: Path) -> None:
    """A torn one is always seen; one bit only by who reads every byte."""
    for step in (50, 100, 150):
        save(tmp_path, step)
    flip_a_bit(biggest(tmp_path / "step-00000100"))
    cut(biggest(tmp_path / "step-00000150"))
    assert latest(tmp_path, "gpt", verify=False).step == 100
    found = latest(tmp_path, "gpt")
    assert found.step == 50
    assert [why.partition(":")[0] for why in found.rejected] == ["step 150 is torn", "step 100 is corrupt"]


@pytest.mark.parametrize("made", [False, True], ids=["no-folder", "torn-only"])
def test_a_job_without_a_whole_checkpoint_is_named_with_the_folder(save: Save, tmp_path: Path, made: bool) -> None:  # noqa: FBT001 (a case)
    """One sentence, with what is wrong with those that are there."""
    folder = tmp_path / "checkpoints"
    if made:
        cut(biggest(save(folder, 50)))
    with pytest.raises(NoCheckpoint, match=f"^job 'gpt' has no complete checkpoint in {folder}") as raised:
        latest(folder, "gpt")
    assert ("step 50 is torn" in str(raised.value)) is made
