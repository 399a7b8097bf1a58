"""Move a rank's state from those who hold it to who takes its place.

Tensors go over the groups, in slices, each sender a share; all is checked on arrival.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.runtime.groups.backends import BackendGroup
from holdfast.tensor_layout import contiguous, is_dense

SLICE: Final = 32 * 2**20
"""Bytes of a slice: what one operation carries, and what is spread over the senders."""
_BLOCK: Final = 2**20
TAG: Final = 0x4D07


class TransferCorrupted(RuntimeError):
    """What arrived is not what was sent."""


def slices(tensors: Sequence[Tensor], share: int, shares: int) -> Iterator[Tensor]:
    """Yield the slices of *share* out of *shares*, as flat views of bytes, in an order that both ends know."""
    number = 0
    for one in tensors:
        flat = bytes_of(one)
        for begin in range(0, flat.numel(), SLICE):
            if number % shares == share:
                yield flat[begin : begin + SLICE]
            number += 1


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of *tensor*: all of a plain one, its shard of a sharded one."""
    return getattr(tensor, "_local_tensor", tensor)


def fills_its_memory(tensor: Tensor) -> bool:
    """Tell whether *tensor* can be copied as the memory that it lies in: a contiguous one, a transposed one, one in `channels_last`.

    Not so one with gaps, one whose elements share memory, and one whose values are not what stands there (a lazy conjugate).
    """
    local = local_of(tensor)
    return local.layout is torch.strided and is_dense(local.shape, local.stride()) and not (local.is_conj() or local.is_neg())


def bytes_of(tensor: Tensor) -> Tensor:
    """Return *tensor*'s memory as a flat view of bytes, in the order in which they lie there; a sharded one's is that of its shard."""
    local = local_of(tensor).detach()
    if not fills_its_memory(local):
        raise ValueError("a tensor with gaps or overlaps in its memory has no flat view: copy it first")
    return local.as_strided((local.numel(),), (1,)).view(torch.uint8)


def digest(parts: Iterable[Tensor]) -> str:
    """Return a digest of *parts*, which are taken one after the other: SHA-256 over the sums of each megabyte, in 64-bit words.

    A sum sees any single flipped bit or lost word at the speed of memory; SHA-256 over all bytes would take longer than the transfer.
    """
    whole = hashlib.sha256()
    for part in parts:
        if part.storage_offset() % 8:  # a parameter that is a view into a flat buffer: words are read where words may lie
            part = part.clone()  # noqa: PLW2901 (the same bytes)
        words = part.numel() // 8 * 8
        head = part[:words].view(torch.int64)
        blocks = head.numel() // (_BLOCK // 8) * (_BLOCK // 8)
        sums = [head[:blocks].view(-1, _BLOCK // 8).sum(1), head[blocks:].sum().reshape(1), part[words:].sum(dtype=torch.int64).reshape(1)]
        whole.update(torch.cat(sums).cpu().numpy().tobytes())
    return whole.hexdigest()


def send(inner: BackendGroup, to: int, tensors: Sequence[Tensor], share: int, shares: int) -> tuple[str, int]:
    """Send this sender's slices to member *to* of the group; return their digest and size."""
    parts = list(slices(tensors, share, shares))
    staged = [_staged(part) for part in parts]
    works = [inner.backend("cpu").send([part], to, TAG) for part in staged]
    told = digest(staged)
    for work in works:
        work.wait()
    return told, sum(part.numel() for part in parts)


def receive(inner: BackendGroup, source: int, tensors: Sequence[Tensor], share: int, shares: int) -> Callable[[], tuple[str, int]]:
    """Begin to take the slices that member *source* sends; return what waits for them and gives digest and size."""
    parts = list(slices(tensors, share, shares))
    staged = [part if part.device.type == "cpu" else torch.empty(part.shape, dtype=torch.uint8, pin_memory=True) for part in parts]
    works = [inner.backend("cpu").recv([part], source, TAG) for part in staged]

    def arriving() -> Iterator[Tensor]:
        for work, part, arrived in zip(works, parts, staged, strict=True):
            work.wait()
            if part is not arrived:
                part.copy_(arrived, non_blocking=True)
            yield arrived

    def finish() -> tuple[str, int]:
        told = digest(arriving())  # of what is there, while the rest still comes
        if any(part.device.type == "cuda" for part in parts):
            torch.cuda.synchronize()
        return told, sum(part.numel() for part in parts)

    return finish


def _staged(part: Tensor) -> Tensor:
    """Return *part* in memory that a network card can read: pinned, when it is on a GPU."""
    if part.device.type == "cpu":
        return part
    host = torch.empty(part.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(part)
    return host


class Clock:
    """Seconds of the phases of a recovery."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> float:
        """Count the time since the last lap to *phase*; return it."""
        now = time.monotonic()
        spent, self._begin = now - self._begin, now
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
        return spent


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a receiver needs to make room for *tensors*: shape, type and strides of each, as JSON holds it."""
    return {key: shape_of(one) for key, one in tensors.items()}


def shape_of(tensor: Tensor) -> list[Any]:
    """Return the shape, the type and the strides with which what this rank holds of *tensor* is moved."""
    local = local_of(tensor)
    strides = local.stride() if fills_its_memory(local) else contiguous(local.shape)
    return [list(local.shape), str(local.dtype).removeprefix("torch."), list(strides)]


def laid_out(tensors: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> list[Tensor]:
    """Return *tensors* as they are *wanted* (see `shapes`), in that order: themselves where they lie so in memory, else copies that do.

    Several who send shares of one state, and who takes it, must agree on which byte is where. Raise `TransferCorrupted` when it is
    another state.
    """
    found = []
    for key, (shape, kind, strides) in wanted.items():
        present = tensors.get(key)
        if present is None or shape_of(present)[:2] != [shape, kind]:
            raise TransferCorrupted(f"'{key}' is wanted with the shape {shape} and type {kind}, and this rank does not hold it so")
        local = local_of(present)
        if list(local.stride()) != strides or not fills_its_memory(local):
            local = torch.empty_strided(shape, strides, dtype=local.dtype, device=local.device).copy_(local)
        found.append(local)
    return found


def places_for(wanted: Mapping[str, Any], own: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a tensor for each of *wanted*: this process's own where it fits, else a fresh one on *device*."""
    found = {}
    for key, (shape, kind, strides) in wanted.items():
        present = own.get(key)
        if present is not None and shape_of(present) == [shape, kind, strides] and fills_its_memory(present):
            found[key] = present
        else:
            found[key] = torch.empty_strided(shape, strides, dtype=getattr(torch, kind), device=device)
    return found
