"""Prove that the snapshots of one moment go together, and compare them with a checkpoint of the same step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.memstore.shared_memory import Snapshot
from holdfast.runtime.checkpoint_verifier import agreement
from holdfast.runtime.checkpoint_verifier.agreement import raw
from holdfast.runtime.checkpoint_verifier.checkpoint import VerifiedCheckpoint
from holdfast.runtime.checkpoint_verifier.findings import Findings, listed
from holdfast.runtime.snapshots.checksum import fill
from holdfast.runtime.state import tree


class VerifiedSnapshots:
    """The snapshots of one moment, opened: a file for each part of each piece, and one of each rank."""

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
        for one in sorted(self.opened, key=lambda each: each.label.part):
            if one.label.part not in {other.label.part for other in self.shards[one.label.shard]}:
                self.shards[one.label.shard].append(one)
        self.blobs: dict[int, dict[str, Any]] = {}
        """Rank to the trees in its snapshot, as far as they can be read."""

    def close(self) -> None:
        """Let go of the files."""
        for one in self.opened:
            one.close()

    def rank_of(self, shard: str) -> int:
        """Return the first rank whose state the piece is."""
        return min(one.label.rank for one in self.shards[shard])

    def tensors(self, shard: str) -> dict[str, Tensor]:
        """Return the tensors of a piece, put together from its parts."""
        parts = self.shards[shard]
        entries = parts[0].entries
        flats = [torch.empty(entry.size, dtype=torch.uint8) for entry in entries]
        for part in parts:
            fill(flats, part)
        return {
            entry.key: flat.view(getattr(torch, entry.dtype)).as_strided(entry.shape, entry.laid_out)
            for entry, flat in zip(entries, flats, strict=True)
        } | self.rest(parts[0].label.rank)

    def rest(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors that were copied whole: buffers, and what lies in memory in pieces."""
        return dict((self.blobs.get(rank, {}).get("dynamic") or {}).get("rest") or {})


def verify_snapshots(moment: VerifiedSnapshots, world: int, found: Findings) -> None:
    """Judge the snapshots of one moment; their bytes are known to be those that were written."""
    labels = [one.label for one in moment.opened]
    moments = {label.moment for label in labels}
    step, lineage = labels[0].moment
    wrong = [f"the snapshots are of several moments: {listed(sorted(moments))}"] if len(moments) > 1 else []
    found.prove(f"the labels of all snapshots say step {step}, lineage {lineage}", wrong)
    broken: list[str] = []
    for rank, one in sorted(moment.ranks.items()):
        moment.blobs[rank] = {}
        for name in ("static", "dynamic", "rank_state"):
            try:
                moment.blobs[rank][name] = tree.unpickled(one.blobs[name])
            except Exception as error:  # noqa: BLE001 (whatever is wrong with it, it is one rank's, and is named)
                broken.append(f"what rank {rank} keeps beside its tensors ('{name}') cannot be read: {type(error).__name__}: {error}")
    found.prove("what every rank keeps beside its tensors can be read without running code", broken)
    _pieces(moment, found)
    rank_states = {rank: blobs["rank_state"] for rank, blobs in moment.blobs.items() if isinstance(blobs.get("rank_state"), Mapping)}
    missing = sorted(set(range(world)) - rank_states.keys())
    found.prove(
        f"the own state of all {world} rank(s) is there",
        [f"the own state of rank {rank} is not there" for rank in missing],
    )
    agreement.positions(found, {rank: one.get("data") for rank, one in rank_states.items()})
    agreement.generators(found, {rank: one.get("rng") for rank, one in rank_states.items()}, world)
    dynamic = {rank: blobs["dynamic"] for rank, blobs in moment.blobs.items() if "dynamic" in blobs}
    agreement.schedulers(found, {rank: one.get("schedulers") or [] for rank, one in dynamic.items()})


def _pieces(moment: VerifiedSnapshots, found: Findings) -> None:
    """Judge the tensors of every piece."""
    broken: list[str] = []
    counts: dict[int, dict[str, float]] = {}
    for shard, parts in moment.shards.items():
        rank = moment.rank_of(shard)
        lost = sorted(set(range(parts[0].label.parts)) - {one.label.part for one in parts})
        apart = [one for one in parts if one.entries != parts[0].entries]
        broken += [f"part {part} of the piece of rank {rank} is not there" for part in lost]
        broken += [f"the index of rank {one.label.rank} is not that of rank {parts[0].label.rank}, a copy of it" for one in apart]
        if lost or apart:
            continue
        tensors = moment.tensors(shard)
        named = _named(moment.blobs[parts[0].label.rank].get("static"))
        broken += [f"'{key}', which rank {rank} names, is not there" for key in sorted(named - tensors.keys())]
        counts[rank] = agreement.scalars(tensors)
        agreement.values(found, {key: tuple(one.shape) for key, one in tensors.items()}, tensors.__getitem__)
    found.prove(f"the parts of {len(moment.shards)} piece(s) have the same index and hold all that it names", broken)
    agreement.counters(found, counts)


def _named(static: Any) -> set[str]:  # noqa: ANN401 (a tree holds anything)
    if not isinstance(static, Mapping):
        return set()
    return {f"model.{name}" for name, value in static["model"].items() if value is None} | tree.keys(static["optimizers"])


# -- two tiers of one step ------------------------------------------------------------------------------------------------


def compare(moment: VerifiedSnapshots, disk: VerifiedCheckpoint, found: Findings) -> None:
    """Compare the snapshots of a moment with the checkpoint of the same step: tensor by tensor, to the bit."""
    broken: list[str] = []
    compared = 0
    shards: dict[str, dict[int, Tensor]] = defaultdict(dict)
    met: set[str] = set()
    for shard in moment.shards:
        rank = moment.rank_of(shard)
        if rank not in disk.trees:
            continue
        buffers = moment.rest(rank) if rank else {}  # those of rank 0 are the ones that a checkpoint keeps
        own = {key: one for key, one in disk.scalars(rank).items() if isinstance(one, Tensor)}
        for key, tensor in moment.tensors(shard).items():
            if key in buffers:
                continue
            met.add(key)
            if key not in own and not disk.reader.has(key):
                broken.append(f"'{key}' is in the memory of rank {rank} and not in the checkpoint")
                continue
            if key in own or tuple(disk.reader.stored(key).size) == tuple(tensor.shape):
                compared += 1
                if not agreement.same(tensor, own.get(key) if key in own else disk.read(key)):
                    broken.append(f"'{key}' of rank {rank} is not the same in memory and on the disk")
            else:
                shards[key][rank] = tensor
    broken += _shards(disk, shards)
    trainable = {key for key in disk.shapes if key.startswith(("model.", "optimizer."))}
    left_out = sorted(key for key in trainable - met if not any(key in moment.rest(rank) for rank in moment.blobs))
    broken += [f"'{key}' is in the checkpoint and in no snapshot" for key in left_out]
    words = f"{compared + len(shards)} tensors of the checkpoint of step {disk.manifest.step} and of the snapshots are equal to the bit"
    found.prove(words, broken)
    _own_states(moment, disk, found)


def _shards(disk: VerifiedCheckpoint, shards: Mapping[str, Mapping[int, Tensor]]) -> list[str]:
    """Compare what is sharded: a rank's shard must be one of those into which the tensor is cut, and each of these some rank's shard.

    A snapshot does not say where its shard begins, so it is found by its bytes.
    """
    broken = []
    for key, by_rank in shards.items():
        wanted = [raw(one) for one in _cut(disk, key, [tuple(one.shape) for one in by_rank.values()])]
        held = {rank: raw(one) for rank, one in by_rank.items()}
        broken += [f"the shard of '{key}' of rank {rank} is none of those on the disk" for rank, one in held.items() if one not in wanted]
        if any(one and one not in held.values() for one in wanted):
            broken.append(f"a shard of '{key}' on the disk is in no rank's memory")
    return broken


def _cut(disk: VerifiedCheckpoint, key: str, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensor as the ranks cut it: along one dimension in equal shards but the last, else as it was stored."""
    complete = disk.read(key)
    largest = max(shapes)
    along = [place for place, size in enumerate(largest) if size != complete.shape[place]] if len(largest) == complete.dim() else []
    if len(along) == 1:
        return list(complete.split(largest[along[0]], along[0]))
    boxes = [tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)) for offsets, sizes in disk.chunks(key)]
    return [complete[box] for box in boxes]


def _own_states(moment: VerifiedSnapshots, disk: VerifiedCheckpoint, found: Findings) -> None:
    """Compare what each rank has of its own, and what is small."""
    broken, drawn = [], []
    for rank, blobs in sorted(moment.blobs.items()):
        if rank not in disk.trees or not {"rank_state", "dynamic"} <= blobs.keys():
            continue
        told = disk.trees[rank]
        settings = [
            [{name: one for name, one in group.items() if name != "params"} for group in each["param_groups"]]
            for each in told["optimizers"]
        ]
        for name, here, there in (
            ("the position in the data", blobs["rank_state"]["data"], told["data"]),
            ("the optimizers' settings", blobs["dynamic"]["settings"], settings),
        ):
            broken += (
                [f"{name} of rank {rank} is not the same in memory and on the disk ({listed(keys)})"]
                if (keys := list(agreement.differences(here, there, "own")))
                else []
            )
        drawn += [rank] if list(agreement.differences(blobs["rank_state"]["rng"], told["rng"], "rng")) else []
    found.prove("every rank's position in the data and its optimizers' settings are the same in memory and on the disk", broken)
    if drawn:
        found.unproven.append(
            f"the generators of rank {listed(drawn)} differ between memory and disk: "
            "something drew numbers between the save and the next step"
        )
    else:
        found.proven.append("every rank's random generators are the same in memory and on the disk")
