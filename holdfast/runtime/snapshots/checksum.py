"""Checksums of snapshots at the speed of memory, on host and device, equal to `holdfast.memstore.shared_memory.word_sum`.

Weights and words are unsigned 64-bit numbers that wrap around; that torch treats them as signed changes no bit of the sum.
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

    An integer dot product runs in this thread only and without the interpreter's lock, and reads no byte twice from memory: a megabyte
    stays in the cache.
    """
    return sum_words(data, _dot, _weights(torch.device("cpu")))


def sum_of(part: Tensor) -> int:
    """Return the checksum of a flat byte view in host memory."""
    return bytes_sum(part.numpy().data)


def fill(flats: Sequence[Tensor], snapshot: Snapshot) -> int:
    """Copy what *snapshot* has of each tensor into the flat byte view of it, and check the checksum of each slice.

    Return the bytes copied; raise `shared_memory.UnusableSnapshot` at a slice with a wrong checksum.
    """
    size = 0
    for spanned, data in snapshot.checked(bytes_sum):
        source, offset = torch.frombuffer(data, dtype=torch.uint8), 0
        for one in spanned:
            flats[one.tensor][one.begin : one.begin + one.length].copy_(source[offset : offset + one.length])
            offset += one.length
        size += offset
    return size


def _dot(data: memoryview, row: Tensor) -> int:
    """Return the sum of the words of *data*, which may begin at any address, each times its weight."""
    words = torch.frombuffer(data, dtype=torch.int64)
    return int(torch.dot(words, row[: len(words)]))


def device_sum(part: Tensor) -> Tensor:
    """Return the checksum of at most `SLICE_BYTES` bytes as a signed number, computed and left on their device."""
    if len(part) > SLICE_BYTES:
        raise ValueError(f"a slice of {len(part)} bytes is longer than {SLICE_BYTES}")
    first, second = _weights(part.device)
    padded = functional.pad(part, (0, -len(part) % _WORD + _WORD))  # in memory of its own, so that words are aligned
    words, later = padded[:-_WORD].view(torch.int64), padded[_HALF:-_HALF].clone().view(torch.int64)
    return (words * first[: len(words)]).sum() + (later * second[: len(later)]).sum()
