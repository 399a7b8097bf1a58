"""Verify that everything in a checkpoint belongs to the step in its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from holdfast.plurals import plural
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Manifest
from holdfast.runtime.checkpoint.storage import METADATA, CheckpointReader
from holdfast.runtime.checkpoint_verifier import agreement
from holdfast.runtime.checkpoint_verifier.findings import Findings, listed
from holdfast.runtime.state import tree

_TREE = "tree."


class VerifiedCheckpoint:
    """A checkpoint opened for reading; the digests of its files are checked elsewhere."""

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
            except Exception as error:  # noqa: BLE001 (any error is one rank's, and is reported for it)
                why = "it is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                self.unread[rank] = why

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors but the trees, by key."""
        keys = self.reader.read_metadata().state_dict_metadata
        return {key: tuple(self.reader.stored(key).size) for key in keys if not key.startswith(_TREE) and self.reader.has(key)}

    def read(self, key: str) -> Tensor:
        """Return the complete tensor stored as *key*."""
        found = {key: self.reader.empty(key)}
        self.reader.fill(found)
        return found[key]

    def chunks(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return offsets and sizes of the chunks in which the tensor is stored."""
        return [(tuple(one.offsets), tuple(one.sizes)) for one in self.reader.stored(key).chunks]

    def scalars(self, rank: int) -> dict[str, Any]:
        """Return the dimensionless optimizer state of *rank*, under the keys that it has in memory."""
        return dict(agreement.leaves(self.trees[rank]["optimizers"], "optimizer"))


def verify_checkpoint(one: VerifiedCheckpoint, found: Findings) -> None:
    """Verify the content of a checkpoint whose files are those in the manifest."""
    world, step = one.manifest.world_size, one.manifest.step
    broken = [f"the tree of rank {rank} cannot be read: {why}" for rank, why in one.unread.items()]
    stored = sorted(key for key in one.reader.read_metadata().state_dict_metadata if key.startswith(_TREE))
    beyond = [key for key in stored if int(key.removeprefix(_TREE)) >= world]
    broken += [f"'{key}' is the tree of a rank beyond the {world} of the manifest" for key in beyond]
    found.prove(f"the trees of all {world} ranks are there and can be read without running code", broken)
    read = {rank: values for rank, values in one.trees.items() if isinstance(values, Mapping)}
    wrong = []
    for rank in one.trees:
        progress = read.get(rank, {}).get("progress")
        at = progress.get("step") if isinstance(progress, Mapping) else None
        if at != step:
            wrong.append(f"the tree of rank {rank} is of step {at}, the manifest of step {step}")
    found.prove(f"the progress of every rank says step {step}, as the manifest does", wrong)
    agreement.check_counters(found, {rank: agreement.step_counters(_with_sharded(one, rank)) for rank in read})
    agreement.check_schedulers(found, {rank: values.get("schedulers") or [] for rank, values in read.items()})
    agreement.check_positions(found, {rank: values.get("data") for rank, values in read.items()})
    agreement.check_generators(found, {rank: values.get("rng") for rank, values in read.items()}, world)
    _verify_tensors(one, read, found)
    found.unproven.append(
        "tensors contain no step number: the digests of all files in one manifest tie them to the step, "
        "written after every rank had written its part"
    )


def _with_sharded(one: VerifiedCheckpoint, rank: int) -> dict[str, Any]:
    """Return the dimensionless optimizer state of *rank*, including counters that are sharded tensors."""
    sharded = [key for key in tree.keys(one.trees[rank]["optimizers"]) if key.endswith(".step") and one.reader.has(key)]
    return {**one.scalars(rank), **{key: one.read(key) for key in sharded}}


def _verify_tensors(one: VerifiedCheckpoint, trees: Mapping[int, Any], found: Findings) -> None:
    """Verify that the tensors are those in the trees, that each is stored completely, and check their values."""
    named: dict[str, int] = {}
    for rank, values in trees.items():
        model = [f"model.{name}" for name, value in values["model"].items() if value is None]
        for key in [*model, *tree.keys([values["optimizers"], values["schedulers"], values["extra"]])]:
            named.setdefault(key, rank)
    shapes = one.shapes
    broken = [f"'{key}', named in the tree of rank {named[key]}, is missing" for key in sorted(named.keys() - shapes.keys())]
    if len(trees) == one.manifest.world_size:
        broken += [f"'{key}' is stored but not named in any rank's tree" for key in sorted(shapes.keys() - named.keys())]
    if len({tuple(sorted(values["model"])) for values in trees.values()}) > 1:
        found.unproven.append("the ranks hold different parts of the model, as in a pipeline; each tree names its own")
    for key in sorted(shapes):
        broken += _check_storage(one, key, shapes[key])
    found.prove(f"{len(named)} tensors are named in the trees, and exactly these are stored", broken)
    complete = {key: shape for key, shape in shapes.items() if not any(f"'{key}'" in line for line in broken)}
    agreement.check_values(found, complete, one.read)


def _check_storage(one: VerifiedCheckpoint, key: str, shape: tuple[int, ...]) -> list[str]:
    """Check that the chunks of a tensor cover it, and that each is in a file of the checkpoint."""
    chunks, metadata = one.chunks(key), one.reader.read_metadata()
    if sum(prod(sizes) for _, sizes in chunks) != prod(shape):
        covering = plural(len(chunks), "stored chunk does", "stored chunks do")
        return [f"'{key}' has the shape {shape}, but its {covering} not cover it"]
    places = metadata.storage_data or {}
    for number, (offsets, sizes) in enumerate(chunks):
        if not prod(sizes):
            continue
        place = places.get(MetadataIndex(key, torch.Size(offsets), number)) or places.get(MetadataIndex(key, torch.Size(offsets)))
        if place is None:
            return [f"'{key}' has a chunk at {listed(offsets)} that is missing in {METADATA}"]
        file = one.manifest.files.get(place.relative_path)
        if file is None or place.offset + place.length > file.size:
            return [f"'{key}' should be in {place.relative_path}, which is not in the manifest or too short"]
    return []
