"""Checksums of snapshots at the speed of memory, on host and device, equal to `holdfast.memstore.shared_memory.word_sum`.

Weights and words are whole numbers of 64 bits that wrap around; that torch takes them for signed ones changes no bit of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.memstore.shared_memory import SLICE_BYTES, Snapshot, sum_words, weights

_WORD: Final = 8
_HALF: Final = 4


@cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return both rows of weights on *device*."""
    first, second = (torch.frombuffer(bytearray(row), dtype=torch.int64).to(device) for row in weights())
    return first, second


def bytes_sum(data: memoryview) -> int:
    """Return the checksum of *data* in host memory.

    A dot product of whole numbers runs in this one thread and without the interpreter's lock, and reads no byte twice from memory: a
    megabyte stays in the cache.
    """
    return sum_words(data, _dot, _weights(torch.device("cpu")))


def sum_of(part: Tensor) -> int:
    """Return the checksum of a flat view of bytes in host memory."""
    return bytes_sum(part.numpy().data)


def fill(flats: Sequence[Tensor], snapshot: Snapshot) -> int:
    """Copy what *snapshot* has of each tensor into the flat view of its bytes, each slice judged by its sum as it goes by.

    Return the bytes copied; raise `shared_memory.UnusableSnapshot` at a slice that is not as it was written.
    """
    size = 0
    for met, data in snapshot.checked(bytes_sum):
        source, there = torch.frombuffer(data, dtype=torch.uint8), 0
        for shard in met:
            flats[shard.tensor][shard.begin : shard.begin + shard.length].copy_(source[there : there + shard.length])
            there += shard.length
        size += there
    return size


def _dot(data: memoryview, row: Tensor) -> int:
    """Return the sum of the words of *data*, which may begin anywhere, each times its weight."""
    words = torch.frombuffer(data, dtype=torch.int64)
    return int(torch.dot(words, row[: len(words)]))


def device_sum(part: Tensor) -> Tensor:
    """Return the checksum of at most `SLICE_BYTES` bytes as a signed number, computed and left on the device on which they are."""
    if len(part) > SLICE_BYTES:
        raise ValueError(f"a slice of {len(part)} bytes is longer than {SLICE_BYTES}")
    first, second = _weights(part.device)
    filled = functional.pad(part, (0, -len(part) % _WORD + _WORD))  # in memory of its own, where words may lie, whatever the view's begin
    words, later = filled[:-_WORD].view(torch.int64), filled[_HALF:-_HALF].clone().view(torch.int64)
    return (words * first[: len(words)]).sum() + (later * second[: len(later)]).sum()
