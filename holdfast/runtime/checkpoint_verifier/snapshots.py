"""Verify that the snapshots of one step belong together, and compare them with a checkpoint of the same step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.memstore.shared_memory import Snapshot
from holdfast.plurals import all_of, plural
from holdfast.runtime.checkpoint_verifier import agreement
from holdfast.runtime.checkpoint_verifier.agreement import raw
from holdfast.runtime.checkpoint_verifier.checkpoint import VerifiedCheckpoint
from holdfast.runtime.checkpoint_verifier.findings import Findings, listed
from holdfast.runtime.snapshots.checksum import fill
from holdfast.runtime.state import tree


class VerifiedSnapshots:
    """The opened snapshots of one step: one file for each part of each shard, and at least one of each rank."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Open *files*; raise ``OSError`` or `shared_memory.UnusableSnapshot` when one cannot be read."""
        self.opened: list[Snapshot] = []
        try:
            self.opened += [Snapshot(path) for path in files]
        except BaseException:
            self.close()
            raise
        self.ranks = {one.label.rank: one for one in self.opened}
        self.shards: dict[str, list[Snapshot]] = defaultdict(list)
        """The parts of each shard, in their order."""
        for one in sorted(self.opened, key=lambda each: each.label.part):
            if one.label.part not in {other.label.part for other in self.shards[one.label.shard]}:
                self.shards[one.label.shard].append(one)
        self.blobs: dict[int, dict[str, Any]] = {}
        """Rank to the trees in its snapshot, as far as they can be read."""

    def close(self) -> None:
        """Close the files."""
        for one in self.opened:
            one.close()

    def rank_of(self, shard: str) -> int:
        """Return the first rank that holds the shard."""
        return min(one.label.rank for one in self.shards[shard])

    def tensors(self, shard: str) -> dict[str, Tensor]:
        """Return the tensors of a shard, assembled from its parts."""
        parts = self.shards[shard]
        entries = parts[0].entries
        flats = [torch.empty(entry.size, dtype=torch.uint8) for entry in entries]
        for part in parts:
            fill(flats, part)
        return {
            entry.key: flat.view(getattr(torch, entry.dtype)).as_strided(entry.shape, entry.full_strides)
            for entry, flat in zip(entries, flats, strict=True)
        } | self.small_tensors(parts[0].label.rank)

    def small_tensors(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors that were copied as values: buffers, and tensors that are not dense in memory."""
        return dict((self.blobs.get(rank, {}).get("dynamic") or {}).get("rest") or {})


def verify_snapshots(snapshots: VerifiedSnapshots, world: int, found: Findings) -> None:
    """Verify the snapshots of one step; their bytes match their checksums."""
    labels = [one.label for one in snapshots.opened]
    moments = {label.moment for label in labels}
    step, lineage = labels[0].moment
    wrong = [f"the snapshots are of several steps or lineages: {listed(sorted(moments))}"] if len(moments) > 1 else []
    found.prove(f"the labels of all snapshots say step {step}, lineage {lineage}", wrong)
    broken: list[str] = []
    for rank, one in sorted(snapshots.ranks.items()):
        snapshots.blobs[rank] = {}
        for name in ("static", "dynamic", "rank_state"):
            try:
                snapshots.blobs[rank][name] = tree.unpickled(one.blobs[name])
            except Exception as error:  # noqa: BLE001 (any error is one rank's, and is reported for it)
                broken.append(f"the values '{name}' of rank {rank} cannot be read: {type(error).__name__}: {error}")
    found.prove("the values that every rank stores alongside its tensors can be read without running code", broken)
    _verify_shards(snapshots, found)
    states = {rank: blobs["rank_state"] for rank, blobs in snapshots.blobs.items() if isinstance(blobs.get("rank_state"), Mapping)}
    missing = [f"the per-rank state of rank {rank} is missing" for rank in sorted(set(range(world)) - states.keys())]
    found.prove(f"the per-rank state of {all_of(world, 'rank')} is there", missing)
    agreement.check_positions(found, {rank: one.get("data") for rank, one in states.items()})
    agreement.check_generators(found, {rank: one.get("rng") for rank, one in states.items()}, world)
    dynamic = {rank: blobs["dynamic"] for rank, blobs in snapshots.blobs.items() if "dynamic" in blobs}
    agreement.check_schedulers(found, {rank: one.get("schedulers") or [] for rank, one in dynamic.items()})


def _verify_shards(snapshots: VerifiedSnapshots, found: Findings) -> None:
    """Verify the tensors of every shard."""
    broken: list[str] = []
    counts: dict[int, dict[str, float]] = {}
    for shard, parts in snapshots.shards.items():
        rank = snapshots.rank_of(shard)
        lost = sorted(set(range(parts[0].label.parts)) - {one.label.part for one in parts})
        other_index = [one for one in parts if one.entries != parts[0].entries]
        broken += [f"part {part} of the shard of rank {rank} is missing" for part in lost]
        broken += [f"the index of rank {one.label.rank} differs from that of its copy, rank {parts[0].label.rank}" for one in other_index]
        if lost or other_index:
            continue
        tensors = snapshots.tensors(shard)
        static, named = snapshots.blobs[parts[0].label.rank].get("static"), set[str]()
        if isinstance(static, Mapping):
            named = {f"model.{name}" for name, value in static["model"].items() if value is None} | tree.keys(static["optimizers"])
        broken += [f"'{key}', named by rank {rank}, is missing" for key in sorted(named - tensors.keys())]
        counts[rank] = agreement.step_counters(tensors)
        agreement.check_values(found, {key: tuple(one.shape) for key, one in tensors.items()}, tensors.__getitem__)
    found.prove(f"the parts of {plural(len(snapshots.shards), 'shard')} have the same index and contain every tensor in it", broken)
    agreement.check_counters(found, counts)


# -- comparing memory and disk ----------------------------------------------------------------------------------------------


def compare(snapshots: VerifiedSnapshots, disk: VerifiedCheckpoint, found: Findings) -> None:
    """Compare snapshots with the checkpoint of the same step, every tensor bit by bit."""
    broken: list[str] = []
    compared = 0
    sharded: dict[str, dict[int, Tensor]] = defaultdict(dict)
    seen: set[str] = set()
    for shard in snapshots.shards:
        rank = snapshots.rank_of(shard)
        if rank not in disk.trees:
            continue
        buffers = snapshots.small_tensors(rank) if rank else {}  # a checkpoint has the buffers of rank 0
        own = {key: one for key, one in disk.scalars(rank).items() if isinstance(one, Tensor)}
        for key, tensor in snapshots.tensors(shard).items():
            if key in buffers:
                continue
            seen.add(key)
            if key not in own and not disk.reader.has(key):
                broken.append(f"'{key}' is in the memory of rank {rank} and not in the checkpoint")
            elif key in own or tuple(disk.reader.stored(key).size) == tuple(tensor.shape):
                compared += 1
                if not agreement.same(tensor, own.get(key) if key in own else disk.read(key)):
                    broken.append(f"'{key}' of rank {rank} is not the same in memory and on the disk")
            else:
                sharded[key][rank] = tensor
    broken += _compare_sharded(disk, sharded)
    trained = {key for key in disk.shapes if key.startswith(("model.", "optimizer."))}
    missing = sorted(key for key in trained - seen if not any(key in snapshots.small_tensors(rank) for rank in snapshots.blobs))
    broken += [f"'{key}' is in the checkpoint and in no snapshot" for key in missing]
    equal = f"{compared + len(sharded)} tensors of the checkpoint of step {disk.manifest.step} and of the snapshots are equal to the bit"
    found.prove(equal, broken)
    _compare_rank_states(snapshots, disk, found)


def _compare_sharded(disk: VerifiedCheckpoint, sharded: Mapping[str, Mapping[int, Tensor]]) -> list[str]:
    """Compare sharded tensors: each rank's part must be one of the parts on disk, and each of these the part of some rank.

    A snapshot does not say where its part begins, so it is found by its bytes.
    """
    broken = []
    for key, by_rank in sharded.items():
        expected = [raw(one) for one in _split(disk, key, [tuple(one.shape) for one in by_rank.values()])]
        stored = {rank: raw(one) for rank, one in by_rank.items()}
        broken += [f"the part of '{key}' of rank {rank} is not on the disk" for rank, one in stored.items() if one not in expected]
        if any(one and one not in stored.values() for one in expected):
            broken.append(f"a part of '{key}' on the disk is in no rank's memory")
    return broken


def _split(disk: VerifiedCheckpoint, key: str, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensor as the ranks split it: along one dimension in equal parts but the last, else as it was stored."""
    tensor = disk.read(key)
    largest = max(shapes)
    along = [dimension for dimension, size in enumerate(largest) if size != tensor.shape[dimension]] if len(largest) == tensor.dim() else []
    if len(along) == 1:
        return list(tensor.split(largest[along[0]], along[0]))
    boxes = [tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)) for offsets, sizes in disk.chunks(key)]
    return [tensor[box] for box in boxes]


def _compare_rank_states(snapshots: VerifiedSnapshots, disk: VerifiedCheckpoint, found: Findings) -> None:
    """Compare the per-rank states and the optimizers' settings."""
    broken, drawn = [], []
    for rank, blobs in sorted(snapshots.blobs.items()):
        if rank not in disk.trees or not {"rank_state", "dynamic"} <= blobs.keys():
            continue
        stored = disk.trees[rank]
        settings = [
            [{name: one for name, one in group.items() if name != "params"} for group in each["param_groups"]]
            for each in stored["optimizers"]
        ]
        for name, here, there in (
            ("the position in the data", blobs["rank_state"]["data"], stored["data"]),
            ("the optimizers' settings", blobs["dynamic"]["settings"], settings),
        ):
            if keys := list(agreement.differences(here, there, "own")):
                broken.append(f"{name} of rank {rank} is not the same in memory and on the disk ({listed(keys)})")
        drawn += [rank] if list(agreement.differences(blobs["rank_state"]["rng"], stored["rng"], "rng")) else []
    found.prove("every rank's position in the data and its optimizers' settings are the same in memory and on the disk", broken)
    if drawn:
        found.unproven.append(
            f"the generators of rank {listed(drawn)} differ between memory and disk: "
            "random numbers were drawn between the save and the next step"
        )
    else:
        found.proven.append("every rank's random generators are the same in memory and on the disk")
