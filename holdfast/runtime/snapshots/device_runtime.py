"""The calls of an accelerator's runtime that snapshots need: pinned memory, two streams of their own, and events.

They are few and in one place, so that what uses them runs in tests without a GPU too, over a runtime that counts what is registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final, Protocol

import torch
from torch import Tensor

CHANGE_STATE: Final = "would change the state without waiting for the snapshot that is copied from it, and without the ranks' vote"
"""What replays of a captured step would do."""
USE_ENDED_COMMUNICATORS: Final = "would use communicators that a recovery has ended, and no rank would notice there that a peer is lost"
"""What replays of a captured operation of a managed group would do."""


class CapturedStep(RuntimeError):
    """A CUDA graph is captured where Python must run at every step."""

    def __init__(self, what: str, replays: str = CHANGE_STATE) -> None:
        super().__init__(what, replays)
        self.what, self.replays = what, replays

    def __str__(self) -> str:
        return (
            f"{self.what} is being captured into a CUDA graph: its replays {self.replays}. Capture computation without collectives "
            "(`torch.compile` does with mode='default', not with mode='reduce-overhead'), and call the optimizer outside of the graph; "
            "or turn snapshots off (`checkpoint: {memory: {interval: 0}}`) and use `groups: stock`"
        )


class CopyEvent(Protocol):
    """A point in a stream: that of copies, that which collects what is copied, or that of training."""

    def query(self) -> bool:
        """Return whether everything before it has been done."""
        ...

    def synchronize(self) -> None:
        """Wait until everything before it has been done."""
        ...

    def milliseconds_until(self, end: CopyEvent) -> float:
        """Return the time from this point to *end*, which both have passed."""
        ...


class DeviceRuntime(Protocol):
    """One device, and two streams on it: one for copies between it and the host, and one that collects on the device what is copied."""

    device: torch.device

    def register(self, address: int, size: int) -> None:
        """Pin *size* bytes of host memory: only from and to such memory copies run beside kernels. Raise ``RuntimeError``."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`, before the memory is unmapped. Raise ``RuntimeError``."""
        ...

    def on_stream(self) -> AbstractContextManager[None]:
        """Have what is launched in the block run on the stream of copies."""
        ...

    def collecting(self) -> AbstractContextManager[None]:
        """Have what is launched in the block run on the stream that collects."""
        ...

    def record(self) -> CopyEvent:
        """Return the current end of the stream of the block; outside of one, of the calling thread's current stream: training's."""
        ...

    def wait(self, event: CopyEvent) -> None:
        """Have what is launched on the stream of the block from now on begin only after *event*. The calling thread does not wait."""
        ...

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy *source* into host memory, on the stream of copies, after everything that was launched on it."""
        ...

    def from_host(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy *source*, pinned host memory, into *target* on the device, as `to_host` does the other way."""
        ...

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return *size* elements of pinned host memory."""
        ...

    def wait_for_training(self) -> None:
        """Have both streams begin what is launched from now on only after all that training has launched so far."""
        ...

    def hold_training(self) -> None:
        """Have what training launches from now on begin only after all that was launched on both streams so far."""
        ...

    def is_capturing(self) -> bool:
        """Return whether the calling thread captures a CUDA graph: what it launches does not run now."""
        ...


class _CudaEvent:
    """An event whose waiter sleeps: a thread that spins would take a core, and the interpreter's lock, from training."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)

    def milliseconds_until(self, end: CopyEvent) -> float:
        assert isinstance(end, _CudaEvent)
        return float(self._event.elapsed_time(end._event))  # noqa: SLF001 (its own class)


class CudaRuntime:
    """A CUDA device.

    Every call sets the device first: the current device of a thread that has just started is 0, and a call there would make a context of
    some hundred megabytes on a GPU that belongs to another rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            # the lowest priority: kernels of training come first
            self._copies, self._collecting = (torch.cuda.Stream(device, priority=0) for _ in range(2))

    def register(self, address: int, size: int) -> None:
        """Pin host memory."""
        with torch.cuda.device(self.device):
            try:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
            except RuntimeError:
                with suppress(RuntimeError):  # CUDA keeps the error for this thread, and its next launch would raise it
                    torch.ones(1, device=self.device)
                raise

    def unregister(self, address: int) -> None:
        """Undo it."""
        with torch.cuda.device(self.device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Launch on the stream of copies."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
            yield

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Launch on the stream that collects."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._collecting):
            yield

    def record(self) -> CopyEvent:
        """Return the end of the current stream of the calling thread."""
        with torch.cuda.device(self.device):
            return _CudaEvent(torch.cuda.current_stream(self.device))

    def wait(self, event: CopyEvent) -> None:
        """Have that stream wait."""
        assert isinstance(event, _CudaEvent)
        with torch.cuda.device(self.device):
            event.hold(torch.cuda.current_stream(self.device))

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Copy to pinned memory."""
        target.copy_(source, non_blocking=True)

    def from_host(self, target: Tensor, source: Tensor) -> None:
        """Copy from pinned memory."""
        target.copy_(source, non_blocking=True)

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory."""
        with torch.cuda.device(self.device):
            return torch.empty(size, dtype=dtype, pin_memory=True)

    def wait_for_training(self) -> None:
        """Wait for the current stream of the calling thread."""
        with torch.cuda.device(self.device):
            for one in (self._copies, self._collecting):
                one.wait_stream(torch.cuda.current_stream(self.device))

    def hold_training(self) -> None:
        """Have the current stream of the calling thread wait."""
        with torch.cuda.device(self.device):
            for one in (self._copies, self._collecting):
                torch.cuda.current_stream(self.device).wait_stream(one)

    def is_capturing(self) -> bool:
        """Ask for the current stream of the calling thread."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()


def runtime_of(device: torch.device) -> DeviceRuntime | None:
    """Return the runtime of *device*; None for host memory."""
    return CudaRuntime(device) if device.type == "cuda" else None
