"""A device's runtime over host memory, for tests of what runs on devices: it counts what is pinned, and its copies arrive late.

What is copied to the host lies there only when the event after it was awaited, or was asked about often enough: who does not wait reads
zeros. It validates the logic around a driver, and no driver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.runtime.snapshots.device_runtime import CopyEvent

ASKED = 2
"""So many times an event says that it has not passed yet."""


@dataclass
class Event:
    """A point in the queue of copies."""

    runtime: CountingRuntime
    position: int
    at: float
    asked: int = 0

    def query(self) -> bool:
        """Say yes once it was awaited, or asked about often enough."""
        self.asked += 1
        if self.asked > ASKED:
            self.synchronize()
        return self.runtime.done >= self.position

    def synchronize(self) -> None:
        """Let everything before it arrive."""
        self.runtime.run(self.position)

    def milliseconds_until(self, end: CopyEvent) -> float:
        """Return the time between the two."""
        assert isinstance(end, Event)
        assert self.runtime.done >= end.position, "an event was read that had not passed"
        return (end.at - self.at) * 1000


@dataclass
class CountingRuntime:
    """A device that is host memory."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pinned_sizes: dict[int, int] = field(default_factory=dict)
    """Address to size of what is registered."""
    registered: list[int] = field(default_factory=list)
    """Sizes of all that ever was."""
    refuses: bool = False
    """Memory cannot be pinned."""
    capturing: bool = False
    done: int = 0
    held: int = 0
    _queue: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _on_stream: bool = False

    def register(self, address: int, size: int) -> None:
        """Pin memory; no byte of it may be pinned already."""
        if self.refuses:
            raise RuntimeError("cannot allocate memory")
        for begin, length in self.pinned_sizes.items():
            if begin < address + size and address < begin + length:
                raise AssertionError(f"{address:#x} is registered already")
        self.pinned_sizes[address] = size
        self.registered.append(size)

    def unregister(self, address: int) -> None:
        """Undo it; no copy may be under way."""
        assert self.done == len(self._queue), "memory was unpinned under a copy"
        del self.pinned_sizes[address]

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Mark what is launched as belonging to the stream of copies."""
        self._on_stream = True
        yield
        self._on_stream = False

    def record(self) -> CopyEvent:
        """Return the end of the queue."""
        return Event(self, len(self._queue), time.perf_counter())

    def record_training(self) -> CopyEvent:
        """Return a point that has passed: what training launches is done at once."""
        return Event(self, 0, time.perf_counter())

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of what *source* is now, as the stream would have it when its turn comes."""
        assert self._on_stream, "a copy was launched on the stream of training"
        self._queue.append((target, source.clone()))

    def from_host(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of what *source* will be when its turn comes: whoever reuses a buffer too soon spoils it."""
        assert self._on_stream, "a copy was launched on the stream of training"
        self._queue.append((target, source))

    def run(self, upto: int) -> None:
        """Let the first copies arrive."""
        for target, source in self._queue[self.done : upto]:
            target.copy_(source)
        self.done = max(self.done, upto)

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros."""
        return torch.zeros(size, dtype=dtype)

    def wait_for_training(self) -> None:
        """Nothing to do: host memory has what training wrote."""

    def hold_training(self) -> None:
        """Count it; training may not go on under a copy."""
        assert self.done == len(self._queue), "training went on under a copy"
        self.held += 1

    def is_capturing(self) -> bool:
        """Return what a test has set."""
        return self.capturing
