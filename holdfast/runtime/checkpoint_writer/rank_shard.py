"""What one rank's snapshot brings to a checkpoint: its tensors in boxes, and its tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.memstore import shared_memory
from holdfast.memstore.shared_memory import Snapshot
from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.checkpoint_writer.chunks import ChunkBox, boxes
from holdfast.runtime.snapshots.checksum import bytes_sum
from holdfast.runtime.state import tree
from holdfast.runtime.state.state_layout import merged_tree
from holdfast.runtime.state.training import tree_key
from holdfast.tensor_layout import memory_order

Claim = tuple[str, tuple[int, ...], tuple[int, ...]]
"""What a rank says that it has: a key, where its part of the tensor begins, the part's shape."""


@dataclass(frozen=True, slots=True)
class Item:
    """Elements of a tensor, to be written: its key, the shape of the whole, which box of it, and they themselves."""

    key: str
    shape: tuple[int, ...]
    box: ChunkBox
    data: Tensor


class RankShard:
    """One rank's part of a checkpoint."""

    def __init__(self, snapshot: Snapshot, request: WriteRequest) -> None:
        """Read the indexes of *snapshot*; raise `shared_memory.UnusableSnapshot` unless it is the one that is meant, as it was written."""
        if snapshot.label.moment != request.moment or snapshot.label.rank != request.rank:
            raise shared_memory.UnusableSnapshot(shared_memory.REPLACED)
        self._snapshot, self._request = snapshot, request
        snapshot.verify(bytes_sum)  # what was changed in memory must not get a digest that says it is sound
        stays, told = tree.unpickled(snapshot.blobs["static"]), tree.unpickled(snapshot.blobs["dynamic"])
        self._shards: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = stays["shards"]
        self._loose = {key: one for key, one in told["rest"].items() if not _is_of_no_use(key, stays["model"])}
        """Tensors that are small, or lie in memory in pieces; of copies of a rank the lowest one writes them."""
        whole = merged_tree(stays, told)
        for name, key in (("schedulers", "scheduler"), ("extra", "extra")):
            whole[name] = tree.pack(whole[name], key, self._loose)
        own = tree.unpickled(snapshot.blobs["rank_state"])
        progress = {"step": request.step, "loss": request.loss}
        self._tree = tree.to_bytes({"progress": progress, **whole, "rng": own["rng"], "data": own["data"]})

    @property
    def shard(self) -> str:
        """Return the piece of the training of which this is a part."""
        return self._snapshot.label.shard

    def _place(self, key: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the whole tensor's shape and where this rank's part of it begins."""
        return self._shards.get(key) or (shape, (0,) * len(shape))

    def claims(self) -> list[Claim]:
        """Return what the piece has, all its parts together."""
        return [(entry.key, self._place(entry.key, entry.shape)[1], entry.shape) for entry in self._snapshot.entries]

    def loose(self) -> list[Claim]:
        """Return what this rank has beside it."""
        return [(key, self._place(key, tuple(one.shape))[1], tuple(one.shape)) for key, one in self._loose.items()]

    def items(self, others: Mapping[str, str | int]) -> Iterator[Item]:
        """Yield what this rank writes; *others*: by name (`named`) who writes what several have, a piece or, of what is loose, a rank."""
        for number, begin, end, place in self._snapshot.stretches():
            entry = self._snapshot.entries[number]
            whole, offset = self._place(entry.key, entry.shape)
            if others.get(named((entry.key, offset, entry.shape)), self.shard) == self.shard:
                dtype = getattr(torch, entry.dtype)
                count = (end - begin) // dtype.itemsize
                flat = torch.frombuffer(self._snapshot.data, dtype=dtype, count=count, offset=place)
                order = memory_order(entry.laid_out)
                lying = [entry.shape[dimension] for dimension in order]
                for box in boxes(lying, begin // dtype.itemsize, end // dtype.itemsize):
                    size = torch.Size(box.sizes).numel()
                    data, flat = flat[:size], flat[size:]
                    turned = data.view(box.sizes).permute([order.index(dimension) for dimension in range(len(order))])
                    yield Item(entry.key, whole, box.turned(order).moved(offset), turned.contiguous())
        for key, one in self._loose.items():
            whole, offset = self._place(key, tuple(one.shape))
            if not one.numel() and torch.Size(whole).numel():
                continue  # a shard without elements
            if others.get(named((key, offset, tuple(one.shape))), self._request.rank) == self._request.rank:
                yield Item(key, whole, ChunkBox(offset, tuple(one.shape)), one)
        own = self._tree
        yield Item(tree_key(self._request.rank), tuple(own.shape), ChunkBox((0,), tuple(own.shape)), own)


def named(claim: Any) -> str:  # noqa: ANN401 (a claim, or the lists that JSON makes of it)
    """Return a claim's name."""
    key, offset, shape = claim
    return f"{key}@{list(offset)}/{list(shape)}"


def _is_of_no_use(key: str, model: Mapping[str, Any]) -> bool:
    """Tell whether a tensor is a buffer that does not belong into a checkpoint, because the model does not keep it."""
    return key.startswith("model.") and key.removeprefix("model.") not in model
