"""A real job's checkpoints and snapshots, and changes to them that no digest shows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.memstore import shared_memory
from holdfast.memstore.shared_memory import Label, Slot, Snapshot, word_sum
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.collective_save import write
from holdfast.runtime.checkpoint.storage import write_metadata
from holdfast.runtime.checkpoint_verifier.checkpoint import VerifiedCheckpoint
from holdfast.runtime.state import tree
from holdfast.runtime.world import World
from tests.runtime.ranks import Ranks

STEP = 11
"""The step of which the disk and the memory have everything."""
Change = Callable[[dict[str, Tensor], dict[int, Any]], object]


@dataclass(frozen=True, slots=True)
class Made:
    """What two ranks have saved: checkpoints of steps 11 and 12, snapshots of steps 9 to 11."""

    directory: Path
    memstore: Path

    def copied(self, base: Path) -> Made:
        """Return a copy below *base* that may be damaged."""
        return Made(Path(shutil.copytree(self.directory, base / "c")), Path(shutil.copytree(self.memstore, base / "v")))

    @property
    def checkpoint(self) -> Path:
        """Return the checkpoint of which there are snapshots too."""
        return manifest.folder_of(self.directory, STEP)

    def snapshots(self, step: int = STEP) -> list[Path]:
        """Return the files of a step, by rank."""
        return sorted(path for path, label in shared_memory.labels(self.memstore).items() if label.step == step)


def make(ranks: Ranks, base: Path, **more: Any) -> Made:
    """Train two ranks that save and take snapshots."""
    made = Made(base / "c", base / "v")
    made.memstore.mkdir(mode=0o700)
    ranks.run("train", 2, {"HOLDFAST_MEMSTORE": str(made.memstore)}, directory=made.directory, every=STEP, until=STEP + 1, **more)
    return made


def rewrite(folder: Path, change: Change) -> None:
    """Rewrite a checkpoint with valid digests after a *change* to its tensors and its ranks' trees."""
    one = VerifiedCheckpoint(folder)
    tensors, trees = {key: one.read(key) for key in one.shapes}, dict(one.trees)
    change(tensors, trees)
    tensors |= {f"tree.{rank:05d}": tree.to_bytes(state) for rank, state in trees.items()}
    shutil.rmtree(folder)
    (part,) = write(tensors, folder, World.current(), lowest=frozenset(), own="")
    files = {**part.files, **write_metadata(part.chunks, folder)}
    whole = manifest.manifest(one.manifest.step, one.manifest.generation, one.manifest.world_size, files)
    (folder / manifest.MANIFEST).write_text(whole.text())


def reseal(path: Path, change: Callable[[bytearray, dict[str, bytes], dict[str, Any]], object]) -> None:
    """Rewrite a snapshot with valid checksums after a *change* to its data, its blobs and its label."""
    with Snapshot(path) as one:
        data, blobs, entries = bytearray(one.data), dict(one.blobs), one.entries
        label = {name: getattr(one.label, name) for name in Label.__dataclass_fields__}
    change(data, blobs, label)
    label |= {"tail": 0, "digest": ""}
    slot = Slot(path)
    slot.begin(Label(**label))
    slot.data[:] = bytes(data)
    sums = [word_sum(data[begin : begin + label["slice_bytes"]]) for begin in range(0, len(data), label["slice_bytes"])]
    slot.seal(Label(**label), sums, entries, blobs)
    slot.close()
