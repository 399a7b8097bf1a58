"""What one rank's snapshot contributes to a checkpoint: its tensors in boxes, and its tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.memstore import shared_memory
from holdfast.memstore.shared_memory import Snapshot
from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.snapshots.checksum import bytes_sum
from holdfast.runtime.state import tree
from holdfast.runtime.state.state_layout import merged_tree
from holdfast.runtime.state.training import tree_key
from holdfast.tensor_layout import memory_order

Claim = tuple[str, tuple[int, ...], tuple[int, ...]]
"""What a rank holds: a key, the offsets of its part of the tensor, the shape of the part."""


class ChunkBox(NamedTuple):
    """A box of a tensor: its offsets and sizes in every dimension; its elements are contiguous in memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def moved(self, by: Sequence[int]) -> ChunkBox:
        """Return the same box in a larger tensor in which this one's begins at *by*."""
        return ChunkBox(tuple(one + other for one, other in zip(self.offsets, by, strict=True)), self.sizes)

    def transposed(self, order: Sequence[int]) -> ChunkBox:
        """Return the same box for the tensor whose dimensions, in their *order* in memory, are this one's."""
        places = sorted(range(len(order)), key=order.__getitem__)
        return ChunkBox(tuple(self.offsets[one] for one in places), tuple(self.sizes[one] for one in places))


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[ChunkBox]:
    """Yield the boxes that cover elements *begin* to *end* of a contiguous tensor of this *shape*, in the order of the elements.

    There are at most two in each dimension but the first: the end of a row, complete rows, the start of a row.
    """
    if not shape:
        if end > begin:
            yield ChunkBox((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row) if row else 0, end // row if row else 0
    if first > last:  # inside one row
        yield from _boxes_in_row(shape, last, begin, end)
        return
    if begin < first * row:
        yield from _boxes_in_row(shape, first - 1, begin, first * row)
    if last > first:
        yield ChunkBox((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if end > last * row:
        yield from _boxes_in_row(shape, last, last * row, end)


def _boxes_in_row(shape: Sequence[int], number: int, begin: int, end: int) -> Iterator[ChunkBox]:
    row = math.prod(shape[1:])
    for box in boxes(shape[1:], begin - number * row, end - number * row):
        yield ChunkBox((number, *box.offsets), (1, *box.sizes))


@dataclass(frozen=True, slots=True)
class Item:
    """Elements of a tensor to be written: its key, the shape of the complete tensor, the box, and its data."""

    key: str
    shape: tuple[int, ...]
    box: ChunkBox
    data: Tensor


class RankShard:
    """One rank's part of a checkpoint."""

    def __init__(self, snapshot: Snapshot, request: WriteRequest) -> None:
        """Verify *snapshot* and read its indexes; raise `shared_memory.UnusableSnapshot` when it is another one or was changed."""
        if snapshot.label.moment != request.moment or snapshot.label.rank != request.rank:
            raise shared_memory.UnusableSnapshot(shared_memory.REPLACED)
        self._snapshot, self._request = snapshot, request
        snapshot.verify(bytes_sum)  # damage in memory must not get a valid digest on disk
        static, dynamic = tree.unpickled(snapshot.blobs["static"]), tree.unpickled(snapshot.blobs["dynamic"])
        self._placements: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = static["shards"]
        """Of sharded tensors: the shape of the complete tensor, and the offsets of this rank's part."""
        self._loose: dict[str, Tensor] = {
            key: one
            for key, one in dynamic["rest"].items()
            if not key.startswith("model.") or key.removeprefix("model.") in static["model"]  # else the model does not save this buffer
        }
        """Tensors that are small or not dense in memory; of copies the lowest rank writes them."""
        merged = merged_tree(static, dynamic)
        for name, key in (("schedulers", "scheduler"), ("extra", "extra")):
            merged[name] = tree.pack(merged[name], key, self._loose)
        own = tree.unpickled(snapshot.blobs["rank_state"])
        progress = {"step": request.step, "loss": request.loss}
        self._tree = tree.to_bytes({"progress": progress, **merged, "rng": own["rng"], "data": own["data"]})

    @property
    def shard(self) -> str:
        """Return the name of the shard of which this is a part."""
        return self._snapshot.label.shard

    def _placement(self, key: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the complete tensor and the offsets of this rank's part."""
        return self._placements.get(key) or (shape, (0,) * len(shape))

    def claims(self) -> list[Claim]:
        """Return what the shard has, all its parts together."""
        return [(entry.key, self._placement(entry.key, entry.shape)[1], entry.shape) for entry in self._snapshot.entries]

    def loose_claims(self) -> list[Claim]:
        """Return the small tensors that this rank has in addition."""
        return [(key, self._placement(key, tuple(one.shape))[1], tuple(one.shape)) for key, one in self._loose.items()]

    def items(self, owners: Mapping[str, str | int]) -> Iterator[Item]:
        """Yield what this rank writes; *owners*: who writes what several have, by `claim_name`: a shard, or the rank for a small tensor."""
        for number, begin, end, offset in self._snapshot.tensor_ranges():
            entry = self._snapshot.entries[number]
            shape, offsets = self._placement(entry.key, entry.shape)
            if owners.get(claim_name((entry.key, offsets, entry.shape)), self.shard) != self.shard:
                continue
            dtype = getattr(torch, entry.dtype)
            count = (end - begin) // dtype.itemsize
            flat = torch.frombuffer(self._snapshot.data, dtype=dtype, count=count, offset=offset)
            order = memory_order(entry.full_strides)
            shape_in_memory = [entry.shape[dimension] for dimension in order]
            for box in boxes(shape_in_memory, begin // dtype.itemsize, end // dtype.itemsize):
                size = torch.Size(box.sizes).numel()
                data, flat = flat[:size], flat[size:]
                transposed = data.view(box.sizes).permute([order.index(dimension) for dimension in range(len(order))])
                yield Item(entry.key, shape, box.transposed(order).moved(offsets), transposed.contiguous())
        for key, one in self._loose.items():
            shape, offsets = self._placement(key, tuple(one.shape))
            if not one.numel() and torch.Size(shape).numel():
                continue  # a shard without elements
            if owners.get(claim_name((key, offsets, tuple(one.shape))), self._request.rank) == self._request.rank:
                yield Item(key, shape, ChunkBox(offsets, tuple(one.shape)), one)
        own = self._tree
        yield Item(tree_key(self._request.rank), tuple(own.shape), ChunkBox((0,), tuple(own.shape)), own)


def claim_name(claim: Any) -> str:  # noqa: ANN401 (a claim, or the lists that JSON makes of it)
    """Return a text that identifies a claim."""
    key, offsets, shape = claim
    return f"{key}@{list(offsets)}/{list(shape)}"
