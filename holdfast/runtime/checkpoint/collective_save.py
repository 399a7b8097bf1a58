"""Write a checkpoint, all ranks together: who writes what several have, then each its part, then rank 0 says what lies where.

What ranks tell each other for that is JSON. `torch.distributed.checkpoint.save` would send pickled plans from rank to rank, and so would
have each run what any of them, or who speaks in its place, says.
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
from holdfast.runtime.checkpoint.storage import Chunk, StorageTrouble, WritePace, write_alone
from holdfast.runtime.checkpoint.storage_errors import StorageError
from holdfast.runtime.checkpoint_writer.chunks import ChunkBox
from holdfast.runtime.checkpoint_writer.rank_shard import Item
from holdfast.runtime.world import World

Claim = tuple[str, tuple[int, ...], int, bool]
"""What a rank has: a key, where its part of that tensor begins, its bytes, and whether the lowest rank that has it shall write it."""


@dataclass(frozen=True, slots=True)
class SavePart:
    """What one rank did for a checkpoint: the files it wrote and what lies where in them, or the trouble it met."""

    files: Mapping[str, WrittenFile]
    chunks: Sequence[Chunk] = ()
    storage_error: StorageError | None = None

    def record(self) -> dict[str, Any]:
        """Return it in values that JSON can hold."""
        storage_error = None if self.storage_error is None else [self.storage_error.kind, self.storage_error.why]
        return {
            "files": {name: asdict(one) for name, one in self.files.items()},
            "chunks": list(self.chunks),
            "storage_error": storage_error,
        }

    @classmethod
    def told(cls, record: Mapping[str, Any]) -> SavePart:
        """Return what another rank's *record* says."""
        files = {name: WrittenFile(**one) for name, one in record["files"].items()}
        return cls(files, [Chunk(*one) for one in record["chunks"]], StorageError.told(record["storage_error"]))


class SavePlan:
    """What this rank has of a state."""

    def __init__(self, state: Mapping[str, Any], lowest: frozenset[str], own: str) -> None:
        """*lowest*: keys of tensors that the lowest rank writes which has them; *own*: the key of a tensor that no other rank has."""
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(dict(state))
        self._lowest, self._own = lowest, own
        self._wanted = [one for one in self._planner.create_local_plan().items if one.type != WriteItemType.BYTE_IO]

    def claims(self) -> list[Claim]:
        """Return what other ranks may have as well."""
        placed = [(*_place(one), _bytes_of(one)) for one in self._wanted]
        return [(key, begin, size, key in self._lowest) for key, begin, size in placed if key != self._own]

    def items(self, given: set[tuple[str, tuple[int, ...]]]) -> Iterator[Item]:
        """Yield what this rank writes: what is *given* to it, and what it alone has."""
        for one in self._wanted:
            key, begin = _place(one)
            told = one.tensor_data
            assert told is not None
            if key != self._own and (key, begin) not in given:
                continue
            sizes = tuple(told.chunk.sizes)
            if not told.chunk.sizes.numel() and told.size.numel():
                continue  # a shard without elements
            data = self._planner.resolve_data(one)
            assert isinstance(data, Tensor)
            yield Item(key, tuple(told.size), ChunkBox(begin, sizes), data.detach())


def _place(one: WriteItem) -> tuple[str, tuple[int, ...]]:
    assert one.tensor_data is not None
    return one.index.fqn, tuple(one.tensor_data.chunk.offsets)


def _bytes_of(one: WriteItem) -> int:
    assert one.tensor_data is not None
    return one.tensor_data.chunk.sizes.numel() * one.tensor_data.properties.dtype.itemsize


def dealt(claims: Sequence[Iterable[Sequence[Any]]], rank: int) -> set[tuple[str, tuple[int, ...]]]:
    """Return which parts *rank* writes, of those that the ranks claim: each once, about the same number of bytes for every rank.

    Buffers (running statistics) differ between DDP's ranks until the next forward pass takes those of rank 0: saving another rank's would
    make a resumed run differ. So some are for the lowest rank that has them.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    facts: dict[tuple[str, tuple[int, ...]], tuple[int, bool]] = {}
    for number, told in enumerate(claims):
        for key, begin, size, lowest in told:
            part = str(key), tuple(begin)
            holders.setdefault(part, []).append(number)
            facts[part] = int(size), bool(lowest)
    loads, mine = [0] * len(claims), set()
    for part, those in holders.items():
        size, lowest = facts[part]
        writer = min(those) if lowest else min(those, key=lambda one: (loads[one], one))
        loads[writer] += size or 1
        if writer == rank:
            mine.add(part)
    return mine


def write(state: Mapping[str, Any], folder: Path, world: World, *, lowest: frozenset[str], own: str) -> list[SavePart]:
    """Write *state* below *folder*, called by all ranks together; return what each of them did.

    What cannot be written is the trouble of its rank's part. The loss of a peer goes through as it is raised.
    """
    plan, why = _planned(state, lowest, own)
    claims = [] if plan is None else plan.claims()
    digest = hashlib.sha256(json.dumps(claims).encode()).hexdigest()
    told = world.gather([digest, why])
    if any(one for _, one in told):
        return [SavePart({}, storage_error=_failed(rank, one) if one else None) for rank, (_, one) in enumerate(told)]
    digests = [one for one, _ in told]  # copies claim the same: the first one's word is enough
    first = digests.index(digest) == world.rank
    spoken: dict[str, list[Any]] = {}
    assert plan is not None
    for one, claimed in zip(digests, world.gather(claims if first else None), strict=True):
        spoken.setdefault(one, claimed)
    part = _written(plan.items(dealt([spoken[one] for one in digests], world.rank)), folder, world.rank)
    return [SavePart.told(one) for one in world.gather(part.record())]


def _planned(state: Mapping[str, Any], lowest: frozenset[str], own: str) -> tuple[SavePlan | None, str]:
    """Return what this rank has; or why that cannot be said."""
    try:
        return SavePlan(state, lowest, own), ""
    except Exception as error:  # noqa: BLE001 (whatever one rank meets, all must hear of it, or they wait for it in vain)
        return None, f"{type(error).__name__}: {error}"


def _written(items: Iterator[Item], folder: Path, rank: int) -> SavePart:
    """Write this rank's *items*."""
    try:
        return SavePart(*write_alone(items, folder, rank, WritePace(None)))
    except StorageTrouble as failed:
        return SavePart({}, storage_error=_failed(rank, failed.words) if failed.cause is None else StorageError.of(failed.cause))
    except Exception as error:  # noqa: BLE001 (as above)
        return SavePart({}, storage_error=_failed(rank, f"{type(error).__name__}: {error}"))


def _failed(rank: int, why: str) -> StorageError:
    return StorageError("checkpoint-write-failed", f"rank {rank}: {why}")
