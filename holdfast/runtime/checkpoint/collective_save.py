"""Write a checkpoint with all ranks together: they agree who writes what several of them hold, then each writes its part.

The ranks exchange JSON. `torch.distributed.checkpoint.save` would send pickled plans from rank to rank, so that each would run code from
any of them, or from whoever impersonates one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from holdfast.runtime.checkpoint.manifest import WrittenFile
from holdfast.runtime.checkpoint.storage import Chunk, WriteFailed, WriteRate, write_items
from holdfast.runtime.checkpoint.storage_errors import StorageError
from holdfast.runtime.checkpoint_writer.rank_shard import ChunkBox, Item
from holdfast.runtime.world import World

Claim = tuple[str, tuple[int, ...], int, bool]
"""What a rank holds: a key, the offsets of its part of that tensor, its bytes, and whether the lowest rank that has it must write it."""


@dataclass(frozen=True, slots=True)
class SavePart:
    """What one rank did for a checkpoint: the files it wrote and the chunks in them, or its error."""

    files: Mapping[str, WrittenFile]
    chunks: Sequence[Chunk] = ()
    storage_error: StorageError | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        error = None if self.storage_error is None else [self.storage_error.kind, self.storage_error.why]
        return {"files": {name: asdict(one) for name, one in self.files.items()}, "chunks": list(self.chunks), "storage_error": error}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SavePart:
        """Return what another rank has sent."""
        files = {name: WrittenFile(**one) for name, one in values["files"].items()}
        return cls(files, [Chunk(*one) for one in values["chunks"]], StorageError.from_json(values["storage_error"]))


class SavePlan:
    """What this rank holds of a state."""

    def __init__(self, state: Mapping[str, Any], lowest: frozenset[str], own: str) -> None:
        """*lowest*: keys of tensors that the lowest rank with them writes; *own*: the key of a tensor that only this rank has."""
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(dict(state))
        self._lowest, self._own = lowest, own
        self._items = [one for one in self._planner.create_local_plan().items if one.type != WriteItemType.BYTE_IO]

    def claims(self) -> list[Claim]:
        """Return what other ranks may hold as well."""
        found = []
        for one in self._items:
            key, offsets = _part_of(one)
            assert one.tensor_data is not None
            if key != self._own:
                size = one.tensor_data.chunk.sizes.numel() * one.tensor_data.properties.dtype.itemsize
                found.append((key, offsets, size, key in self._lowest))
        return found

    def items(self, assigned: set[tuple[str, tuple[int, ...]]]) -> Iterator[Item]:
        """Yield what this rank writes: what is *assigned* to it, and what only it holds."""
        for one in self._items:
            key, offsets = _part_of(one)
            tensor = one.tensor_data
            assert tensor is not None
            if key != self._own and (key, offsets) not in assigned:
                continue
            if not tensor.chunk.sizes.numel() and tensor.size.numel():
                continue  # a shard without elements
            data = self._planner.resolve_data(one)
            assert isinstance(data, Tensor)
            yield Item(key, tuple(tensor.size), ChunkBox(offsets, tuple(tensor.chunk.sizes)), data.detach())


def _part_of(one: WriteItem) -> tuple[str, tuple[int, ...]]:
    assert one.tensor_data is not None
    return one.index.fqn, tuple(one.tensor_data.chunk.offsets)


def assigned_parts(claims: Sequence[Iterable[Sequence[Any]]], rank: int) -> set[tuple[str, tuple[int, ...]]]:
    """Return the parts that *rank* writes, of all *claims* by rank: each part once, about the same number of bytes for every rank.

    Buffers (running statistics) differ between DDP's ranks until the next forward pass copies those of rank 0: saving another rank's
    would make a resumed run differ. So some parts are assigned to the lowest rank that has them.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    facts: dict[tuple[str, tuple[int, ...]], tuple[int, bool]] = {}
    for number, of_rank in enumerate(claims):
        for key, offsets, size, lowest in of_rank:
            part = str(key), tuple(offsets)
            holders.setdefault(part, []).append(number)
            facts[part] = int(size), bool(lowest)
    loads, mine = [0] * len(claims), set()
    for part, ranks in holders.items():
        size, lowest = facts[part]
        writer = min(ranks) if lowest else min(ranks, key=lambda one: (loads[one], one))
        loads[writer] += size or 1
        if writer == rank:
            mine.add(part)
    return mine


def write(state: Mapping[str, Any], folder: Path, world: World, *, lowest: frozenset[str], own: str) -> list[SavePart]:
    """Write *state* below *folder*, called by all ranks together; return what each of them did.

    A rank that cannot write reports its error in its part. The loss of a peer is raised.
    """
    plan, why = None, ""
    try:
        plan = SavePlan(state, lowest, own)
    except Exception as error:  # noqa: BLE001 (any error of one rank must reach all, or they wait for it forever)
        why = f"{type(error).__name__}: {error}"
    claims = [] if plan is None else plan.claims()
    digest = hashlib.sha256(json.dumps(claims).encode()).hexdigest()
    answers = world.gather([digest, why])
    if any(one for _, one in answers):
        return [SavePart({}, storage_error=_failed(rank, one) if one else None) for rank, (_, one) in enumerate(answers)]
    digests = [one for one, _ in answers]  # copies claim the same parts: only the first rank of each digest sends its claims
    first = digests.index(digest) == world.rank
    by_digest: dict[str, list[Any]] = {}
    assert plan is not None
    for one, claimed in zip(digests, world.gather(claims if first else None), strict=True):
        by_digest.setdefault(one, claimed)
    assigned = assigned_parts([by_digest[one] for one in digests], world.rank)
    try:
        part = SavePart(*write_items(plan.items(assigned), folder, world.rank, WriteRate(None)))
    except WriteFailed as failed:
        part = SavePart({}, storage_error=_failed(world.rank, failed.text) if failed.cause is None else StorageError.of(failed.cause))
    except Exception as error:  # noqa: BLE001 (as above)
        part = SavePart({}, storage_error=_failed(world.rank, f"{type(error).__name__}: {error}"))
    return [SavePart.from_json(one) for one in world.gather(part.as_json())]


def _failed(rank: int, why: str) -> StorageError:
    return StorageError("checkpoint-write-failed", f"rank {rank}: {why}")
