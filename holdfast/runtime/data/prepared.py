"""A `DataLoader` that Accelerate has prepared: what its own iteration does besides loading, done for a `Loader` that iterates in its place.

Accelerate's iterator reads one batch ahead to find the end, and so uses random numbers of a batch that is not computed yet. A `Loader`
knows the end by the number of batches. Nothing of Accelerate is imported here: the script that prepared the loader has done it.
"""

from __future__ import annotations

import sys
from typing import Any, Self

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset


class PreparedLoader:
    """The Accelerate side of a prepared loader: device, epochs, and what gradient accumulation knows of the position."""

    def __init__(self, loader: Any) -> None:  # noqa: ANN401 (a DataLoaderShard)
        self._loader = loader
        self.inner: DataLoader[Any] = loader.base_dataloader
        """The loader of this rank's batches."""
        self._active = False
        if type(loader).__name__ != "DataLoaderShard" or isinstance(self.inner.dataset, IterableDataset):
            raise TypeError(
                "Loader(...) supports what accelerator.prepare makes of a DataLoader over a dataset with a length, without "
                f"dispatch_batches; this is a {type(loader).__name__} over a {type(self.inner.dataset).__name__}"
            )
        if loader.rng_types and dist.is_available() and dist.is_initialized():  # once is enough: nothing else draws from it
            sys.modules["accelerate.utils"].synchronize_rng_states(loader.rng_types, loader.synchronized_generator)

    @classmethod
    def of(cls, loader: Any) -> Self | None:  # noqa: ANN401 (any DataLoader)
        """Return the Accelerate side of *loader*, if it has one; raise ``TypeError`` for one that cannot be resumed."""
        return cls(loader) if hasattr(type(loader), "adjust_state_dict_for_prefetch") else None

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of samplers and dataset."""
        self._loader.set_epoch(epoch)

    def place(self, batch: Any, *, last: bool) -> Any:  # noqa: ANN401 (a batch)
        """Return *batch* on the device; *last*: it is the last one of the epoch, after which Accelerate applies what it has accumulated."""
        if not self._active:
            self._active = True
            self._loader.begin()
        self._loader.end_of_dataloader = last
        if self._loader.device is None:
            return batch
        return sys.modules["accelerate.utils"].send_to_device(batch, self._loader.device, non_blocking=self._loader._non_blocking)  # noqa: SLF001

    def end_epoch(self) -> None:
        """Let Accelerate know that no loader is active."""
        if self._active:
            self._active = False
            self._loader.end()
