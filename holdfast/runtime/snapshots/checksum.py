"""Checksums of snapshots at the speed of memory, on host and device, equal to `holdfast.memstore.shared_memory.word_sum`.

Weights and words are unsigned 64-bit numbers that wrap around; that torch treats them as signed changes no bit of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from holdfast.memstore.shared_memory import SLICE_BYTES, Snapshot, sum_words, weights
from holdfast.runtime.snapshots.device_runtime import DeviceRuntime, runtime_of
from holdfast.runtime.state.pinned_ring import PinnedRing

_HALF: Final = 4
_HALF_BITS: Final = 32
_HALF_MASK: Final = (1 << _HALF_BITS) - 1


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


def fill(flats: Sequence[Tensor], snapshot: Snapshot, *, runtime: DeviceRuntime | None = None) -> int:
    """Copy what *snapshot* has of each tensor into the flat byte view of it, and check the checksum of each slice.

    What goes to a device goes through a small ring of pinned buffers, one while the next is checked; *runtime*: that of the device, by
    default of the tensors' own. Return the bytes copied; raise `shared_memory.UnusableSnapshot` at a slice with a wrong checksum.
    """
    runtime = runtime or next((runtime_of(one.device) for one in flats if one.device.type != "cpu"), None)
    ring = PinnedRing(runtime, snapshot.label.slice_bytes) if runtime is not None else None
    size = 0
    try:
        for spanned, data in snapshot.checked(bytes_sum):
            source, offset = torch.frombuffer(data, dtype=torch.uint8), 0
            if ring is not None:
                source = ring.take(len(source)).copy_(source)
            for one in spanned:
                target, part = flats[one.tensor][one.begin : one.begin + one.length], source[offset : offset + one.length]
                if ring is not None and target.device == ring.runtime.device:
                    ring.put(target, part)
                else:
                    target.copy_(part)
                offset += one.length
            size += offset
    finally:
        if ring is not None:
            ring.close()
    return size


def _dot(data: memoryview, row: Tensor) -> int:
    """Return the sum of the words of *data*, which may begin at any address, each times its weight."""
    words = torch.frombuffer(data, dtype=torch.int64)
    return int(torch.dot(words, row[: len(words)]))


@cache
def _half_weights(device: torch.device) -> Tensor:
    """Return the weight of each 32-bit half word of a slice on *device*: each is part of a word of both rows, except for the first."""
    first, second = _weights(torch.device("cpu"))
    row = torch.empty(2 * len(first), dtype=torch.int64)
    row[::2] = first
    row[2::2] += second[:-1] << _HALF_BITS
    row[1::2] = (first << _HALF_BITS) + second
    return row.to(device)


def device_sums(data: Tensor) -> Tensor:
    """Return the checksum of each `SLICE_BYTES` of *data* as a signed number, computed and left on their device.

    Args:
        data: flat bytes, the last slice filled up with zeros, which change no sum; aligned to four bytes.

    One pass over half words for all slices: a kernel for each megabyte would take longer to launch than to run.
    """
    if len(data) % SLICE_BYTES:
        raise ValueError(f"{len(data)} bytes are not whole slices of {SLICE_BYTES}")
    halves = data.view(torch.int32).view(-1, SLICE_BYTES // _HALF).to(torch.int64).bitwise_and_(_HALF_MASK)
    return halves.mul_(_half_weights(data.device)).sum(1)
