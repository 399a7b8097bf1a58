"""Some bytes of the state at one moment, which show later whether it has changed since. Taking them does not wait for a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from holdfast.runtime.state.tensors import bytes_of, fills_its_memory, local_of

TENSORS: Final = 256
"""Most tensors of which bytes are kept: an optimizer's step changes nearly all of them."""
BYTES: Final = 64
"""Bytes of each tensor."""


class StateSample:
    """Bytes of the state as they are now."""

    def __init__(self, flats: Sequence[Tensor], moment: tuple[int, int] | None = None) -> None:
        """*flats*: the memory of the state's tensors as flat bytes; *moment*: step and lineage of the snapshot that is begun now."""
        self.moment = moment
        self._views: dict[torch.device, list[Tensor]] = {}
        for one in flats[:: -(-len(flats) // TENSORS) or 1]:
            self._views.setdefault(one.device, []).append(one[:BYTES])
        self._bytes = [torch.cat(views) for views in self._views.values()]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> StateSample:
        """Return a sample of those of *tensors* that have a memory to themselves."""
        return cls([bytes_of(one) for one in tensors if local_of(one).numel() and fills_its_memory(one)])

    def has_changed(self) -> bool:
        """Return whether the same bytes are others now; waits for the device."""
        return any(not torch.equal(torch.cat(views), before) for views, before in zip(self._views.values(), self._bytes, strict=True))
