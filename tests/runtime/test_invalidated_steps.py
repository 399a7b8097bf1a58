"""No rank resumes from an invalidated state, on disk or in memory; the same steps, done again, count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import holdfast
from holdfast.runtime.agent_client import link
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import InvalidatedSteps
from holdfast.runtime.snapshots.restore import SnapshotSource
from holdfast.runtime.snapshots.restore_planner import SnapshotRef


def train(place: Path, until: int, every: int = 2) -> Any:
    """Train a model that learns nothing, or go on with it."""
    with holdfast.session(model=nn.Linear(2, 2), checkpoint_dir=place, save_every=every, keep=5) as session:
        begun = session.steps_done
        for step in session.steps(until=until):
            step.end(1.0)
    return begun


def test_invalidated_checkpoints_are_skipped_until_they_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older ones that count are kept meanwhile."""
    train(tmp_path, until=8)
    monkeypatch.setenv("HOLDFAST_INVALIDATED", "5:7")
    monkeypatch.setattr(link(), "generation", 7)
    assert list(manifest.complete_steps(tmp_path, InvalidatedSteps.of())) == [4, 2]
    assert train(tmp_path, until=6) == 4
    assert list(manifest.complete_steps(tmp_path, InvalidatedSteps.of())) == [6, 4, 2], "step 8 is still the spoiled one"
    assert train(tmp_path, until=10) == 6
    assert list(manifest.complete_steps(tmp_path, InvalidatedSteps.of()))[:2] == [10, 8]


def test_invalidated_snapshots_of_earlier_generations_do_not_count() -> None:
    """From the step on; nothing else is touched."""
    memory = SnapshotSource.of({"HOLDFAST_INVALIDATED": "5:7,90:9"})
    facts = {"node": "n", "name": "rank-0", "rank": 0, "shard": "p", "part": 0, "parts": 1}
    steps = [(4, 0), (5, 6), (5, 7), (90, 8), (90, 9)]
    kept = memory.usable([[{**facts, "step": step, "lineage": lineage} for step, lineage in steps]])
    assert {(one.step, one.lineage) for one in kept} == {(4, 0), (5, 7), (90, 9)}
    assert all(isinstance(one, SnapshotRef) for one in kept)


def test_consecutive_steps_are_skipped_at_the_first() -> None:
    """So that each is done with a batch of none of them."""
    off = InvalidatedSteps.of({"HOLDFAST_SKIP_STEPS": "3,4,9"})
    assert [off.skipped_before(step) for step in range(1, 11)] == [0, 0, 2, 0, 0, 0, 0, 0, 1, 0]
