"""A device's runtime over host memory, for tests of what runs on devices: it counts what is pinned, and its copies arrive late.

It has two streams. What is collected is there at once. What is copied to the host lies there only when the event after it was awaited, or
was asked about often enough: who does not wait reads zeros. The copy takes what its source is by then: whoever fills a buffer again too
soon spoils it. It validates the logic around a driver, and no driver.
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
    """A point in the queue of copies, or among what was collected."""

    runtime: CountingRuntime
    position: int
    """So many copies are before it."""
    at: float
    """When it has passed; before that, when it was recorded."""
    collected: int = 0
    """Its number among the points of the stream that collects; 0: it is of another stream."""
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
        self.runtime.awaited = max(self.runtime.awaited, self.collected)

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
    copying: list[int] = field(default_factory=list)
    """How many copies were under way at the end of each block that collects."""
    fails_at: int = -1
    """The number of the copy that cannot be launched."""
    _queue: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _events: list[Event] = field(default_factory=list)
    """Those of copies that have not passed."""
    _stream: str = ""
    """The stream of the current block, ``copies`` or ``collecting``; empty: training's."""
    _points: int = 0
    """Events of the stream that collects."""
    awaited: int = 0
    """The newest of them that copies wait for."""

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
        self._stream = "copies"
        try:
            yield
        finally:
            self._stream = ""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Let what is launched run at once."""
        self._stream = "collecting"
        try:
            yield
        finally:
            self._stream = ""
            self.copying.append(len(self._queue) - self.done)

    def record(self) -> CopyEvent:
        """Return the end of the current stream."""
        if self._stream == "copies":
            event = Event(self, len(self._queue), time.perf_counter())
            self._events.append(event)
            return event
        if not self._stream:
            return self.record_training()
        self._points += 1
        return Event(self, 0, time.perf_counter(), self._points)

    def record_training(self) -> CopyEvent:
        """Return a point that has passed: what training launches is done at once."""
        return Event(self, 0, time.perf_counter())

    def wait(self, event: CopyEvent) -> None:
        """Collect only after the copies before *event*, or copy only what was collected before it."""
        assert isinstance(event, Event)
        if self._stream == "collecting":
            self.run(event.position)
        else:
            assert self._stream == "copies", "training would wait"
            self.awaited = event.collected

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of what *source* will be when its turn comes."""
        assert self._stream == "copies", "a copy was launched on another stream"
        assert self.awaited == self._points, "a copy was launched that does not wait for what it copies"
        if len(self._queue) == self.fails_at:
            raise RuntimeError("CUDA error: out of memory")
        self._queue.append((target, source))

    def from_host(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of what *source* will be when its turn comes."""
        assert self._stream == "copies", "a copy was launched on another stream"
        self._queue.append((target, source))

    def run(self, upto: int) -> None:
        """Let the first copies arrive."""
        for target, source in self._queue[self.done : upto]:
            target.copy_(source)
        self.done = max(self.done, upto)
        for event in self._events:
            if event.position <= self.done:
                event.at = time.perf_counter()
        self._events = [event for event in self._events if event.position > self.done]

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
