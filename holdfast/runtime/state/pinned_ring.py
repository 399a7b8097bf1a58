"""A few pinned buffers that take turns, through which state goes between a device and the network or files.

Pinning all of a state at once would take as much host memory again, for seconds, in the middle of a recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from holdfast.runtime.snapshots.device_runtime import DeviceRuntime

BUFFERS: Final = 3
"""One is filled, one is emptied, and one is ready."""


class PinnedRing:
    """Buffers of *size* bytes of pinned host memory. Copies run on the runtime's own stream; `close` makes training wait for them."""

    def __init__(self, runtime: DeviceRuntime, size: int) -> None:
        self.runtime = runtime
        self._size, self._next = size, 0
        self._buffers: list[Tensor] = []
        self._busy: list[Callable[[], object] | None] = [None] * BUFFERS
        """For each buffer, what waits until it may be used again."""
        runtime.wait_for_training()

    def take(self, size: int) -> Tensor:
        """Return the first *size* bytes of the next buffer, once what used it before has ended."""
        if size > self._size:
            raise ValueError(f"{size} bytes do not fit into a buffer of {self._size}")
        at = self._next % BUFFERS
        if at == len(self._buffers):
            self._buffers.append(self.runtime.pinned(self._size, torch.uint8))
        wait, self._busy[at] = self._busy[at], None
        if wait is not None:
            wait()
        self._next += 1
        return self._buffers[at][:size]

    def hold(self, wait: Callable[[], object]) -> None:
        """Keep the buffer that was taken last until *wait* has returned."""
        self._busy[(self._next - 1) % BUFFERS] = wait

    def fetch(self, source: Tensor) -> Tensor:
        """Return the bytes of *source*, flat on the device, in the next buffer."""
        buffer = self.take(len(source))
        with self.runtime.on_stream():
            self.runtime.to_host(buffer, source)
            self.runtime.record().synchronize()
        return buffer

    def put(self, target: Tensor, buffer: Tensor) -> None:
        """Begin to copy *buffer*, the one that was taken last, into *target* on the device."""
        with self.runtime.on_stream():
            self.runtime.from_host(target, buffer)
            self.hold(self.runtime.record().synchronize)

    def close(self) -> None:
        """Wait for all that uses the buffers."""
        waits, self._busy = [wait for wait in self._busy if wait is not None], [None] * BUFFERS
        for wait in waits:
            wait()
        self.runtime.hold_training()
