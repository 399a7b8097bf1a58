"""A node that was replaced may still reach the storage, and its agent does not know: a file in the folder names the current generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.agent_client import AgentAnswer
from holdfast.runtime.checkpoint import manifest, publish
from holdfast.runtime.checkpoint.publish import begin_generation, put_in_place
from tests.mentions import mentions

YES = AgentAnswer(ok=True, why="")


def written(directory: Path, step: int, generation: int) -> tuple[manifest.Manifest, Path]:
    """Return a checkpoint that is complete except for its name."""
    partial = manifest.staging_folder(directory, step, "partial", generation)
    partial.mkdir(parents=True)
    return manifest.manifest(step, generation, 1, {}), partial


def put(directory: Path, step: int, generation: int) -> AgentAnswer:
    """Publish a checkpoint with the permission of a partitioned agent."""
    return put_in_place(*written(directory, step, generation), manifest.folder_of(directory, step), lambda: YES)


def test_a_generation_that_was_replaced_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had permission, and did not know."""
    monkeypatch.setenv("HOLDFAST_TOKEN", "a secret")
    begin_generation(tmp_path, 3)
    assert put(tmp_path, 10, 3).ok
    begin_generation(tmp_path, 4)
    late = put(tmp_path, 20, 3)
    assert late.ok is False
    assert mentions(late.why, "generation 3", "generation 4")
    assert not manifest.folder_of(tmp_path, 20).exists()
    begin_generation(tmp_path, 3)  # a rank that comes back late takes nothing back
    assert not put(tmp_path, 30, 3).ok
    assert put(tmp_path, 40, 4).ok
    assert "a secret" not in (tmp_path / publish.FENCE).read_text()


def test_a_new_job_in_the_same_folder_counts_from_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job before may have reached any number; what remains of it publishes nothing any more."""
    monkeypatch.setenv("HOLDFAST_TOKEN", "first")
    begin_generation(tmp_path, 9)
    monkeypatch.setenv("HOLDFAST_TOKEN", "second")
    begin_generation(tmp_path, 1)
    assert put(tmp_path, 10, 1).ok
    monkeypatch.setenv("HOLDFAST_TOKEN", "first")
    assert mentions(put(tmp_path, 20, 9).why, "another job")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', '{"job": "x", "generation": "y"}'])
def test_an_unreadable_fence_does_not_prevent_saving(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be torn by a full disk."""
    monkeypatch.setenv("HOLDFAST_TOKEN", "a secret")
    (tmp_path / publish.FENCE).write_text(text)
    assert put(tmp_path, 10, 1).ok
    begin_generation(tmp_path, 2)
    assert not put(tmp_path, 20, 1).ok


def test_a_script_without_an_agent_writes_no_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No generation could replace it."""
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    begin_generation(tmp_path, 1)
    assert not (tmp_path / publish.FENCE).exists()
    assert put(tmp_path, 10, 1).ok
