"""Prove that all of a checkpoint belongs to the step that its manifest names."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Manifest
from holdfast.runtime.checkpoint.storage import METADATA, CheckpointReader
from holdfast.runtime.checkpoint_verifier import agreement
from holdfast.runtime.checkpoint_verifier.findings import Findings, listed
from holdfast.runtime.state import tree

_TREE = "tree."


class VerifiedCheckpoint:
    """A checkpoint opened for reading; its files' digests are judged elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = manifest.read(folder)
        self.reader = CheckpointReader(folder)
        self.trees: dict[int, Any] = {}
        """The tree of each rank, as far as they can be read."""
        self.unread: dict[int, str] = {}
        """Ranks whose tree cannot be read, and why."""
        for rank in range(self.manifest.world_size):
            try:
                self.trees[rank] = tree.from_bytes(self.read(f"{_TREE}{rank:05d}"))
            except Exception as error:  # noqa: BLE001 (whatever is wrong with it, it is one rank's tree, and is named)
                why = "it is not there" if isinstance(error, KeyError) else f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                self.unread[rank] = why

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors but the trees, by key."""
        keys = self.reader.read_metadata().state_dict_metadata
        return {key: tuple(self.reader.stored(key).size) for key in keys if not key.startswith(_TREE) and self.reader.has(key)}

    def read(self, key: str) -> Tensor:
        """Return the whole tensor stored as *key*."""
        found = {key: self.reader.empty(key)}
        self.reader.fill(found)
        return found[key]

    def chunks(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return offsets and sizes of the chunks in which the tensor is stored."""
        return [(tuple(one.offsets), tuple(one.sizes)) for one in self.reader.stored(key).chunks]

    def scalars(self, rank: int) -> dict[str, Any]:
        """Return what the optimizers of *rank* keep without dimensions, under the keys that it has in memory."""
        return dict(agreement.leaves(self.trees[rank]["optimizers"], "optimizer"))


def verify_checkpoint(one: VerifiedCheckpoint, found: Findings) -> None:
    """Judge all that a checkpoint holds; the files are known to be those that the manifest names."""
    world, step = one.manifest.world_size, one.manifest.step
    broken = [f"the tree of rank {rank} cannot be read: {why}" for rank, why in one.unread.items()]
    broken += [f"'{key}' is the tree of a rank beyond the {world} of the manifest" for key in _strange_trees(one)]
    found.prove(f"the trees of all {world} ranks are there and can be read without running code", broken)
    at = {rank: _step_of(told) for rank, told in one.trees.items()}
    wrong = [f"the tree of rank {rank} is of step {told}, the manifest of step {step}" for rank, told in at.items() if told != step]
    found.prove(f"the progress of every rank says step {step}, as the manifest does", wrong)
    trees = {rank: told for rank, told in one.trees.items() if isinstance(told, Mapping)}
    agreement.counters(found, {rank: agreement.scalars(_with_sharded(one, rank)) for rank in trees})
    agreement.schedulers(found, {rank: told.get("schedulers") or [] for rank, told in trees.items()})
    agreement.positions(found, {rank: told.get("data") for rank, told in trees.items()})
    agreement.generators(found, {rank: told.get("rng") for rank, told in trees.items()}, world)
    _tensors(one, trees, found)
    found.unproven.append(
        "tensors carry no step of their own: they are tied to the step by the digests of all files in one manifest, "
        "written when every rank had written its part"
    )


def _step_of(told: Any) -> Any:  # noqa: ANN401 (a tree holds anything)
    progress = told.get("progress") if isinstance(told, Mapping) else None
    return progress.get("step") if isinstance(progress, Mapping) else None


def _strange_trees(one: VerifiedCheckpoint) -> list[str]:
    keys = one.reader.read_metadata().state_dict_metadata
    return sorted(key for key in keys if key.startswith(_TREE) and int(key.removeprefix(_TREE)) >= one.manifest.world_size)


def _with_sharded(one: VerifiedCheckpoint, rank: int) -> dict[str, Any]:
    """Return what the optimizers of *rank* keep without dimensions, counters that are sharded tensors among them."""
    held = one.scalars(rank)
    marked = [key for key in tree.keys(one.trees[rank]["optimizers"]) if key.endswith(".step") and one.reader.has(key)]
    return {**held, **{key: one.read(key) for key in marked}}


def _tensors(one: VerifiedCheckpoint, trees: Mapping[int, Any], found: Findings) -> None:
    """See that the tensors are those that the trees name, that each is stored whole, and look at their values."""
    named: dict[str, int] = {}
    for rank, told in trees.items():
        model = [f"model.{name}" for name, value in told["model"].items() if value is None]
        for key in [*model, *tree.keys([told["optimizers"], told["schedulers"], told["extra"]])]:
            named.setdefault(key, rank)
    shapes = one.shapes
    broken = [f"'{key}', which the tree of rank {named[key]} names, is not there" for key in sorted(named.keys() - shapes.keys())]
    if len(trees) == one.manifest.world_size:
        broken += [f"'{key}' is there and no rank's tree names it" for key in sorted(shapes.keys() - named.keys())]
    parameters = {rank: sorted(name for name in told["model"]) for rank, told in trees.items()}
    if len({tuple(names) for names in parameters.values()}) > 1:
        found.unproven.append("the ranks hold different parts of the model, as in a pipeline: each names its own")
    for key in sorted(shapes):
        broken += _stored_whole(one, key, shapes[key])
    found.prove(f"{len(named)} tensors are named by the trees, and these are stored, no more and no fewer", broken)
    complete = {key: shape for key, shape in shapes.items() if not any(f"'{key}'" in line for line in broken)}
    agreement.values(found, complete, one.read)


def _stored_whole(one: VerifiedCheckpoint, key: str, shape: tuple[int, ...]) -> list[str]:
    """See that the chunks of a tensor cover it, and that each lies in a file of the checkpoint."""
    chunks, metadata = one.chunks(key), one.reader.read_metadata()
    if sum(prod(sizes) for _, sizes in chunks) != prod(shape):
        return [f"'{key}' has the shape {shape}, and its {len(chunks)} stored chunk(s) do not make that up"]
    places = metadata.storage_data or {}
    for number, (offsets, sizes) in enumerate(chunks):
        if not prod(sizes):
            continue
        place = places.get(MetadataIndex(key, torch.Size(offsets), number)) or places.get(MetadataIndex(key, torch.Size(offsets)))
        if place is None:
            return [f"'{key}' has a chunk at {listed(offsets)} that {METADATA} says nothing of"]
        file = one.manifest.files.get(place.relative_path)
        if file is None or place.offset + place.length > file.size:
            return [f"'{key}' should lie in {place.relative_path}, which the manifest does not name or which is too short"]
    return []
