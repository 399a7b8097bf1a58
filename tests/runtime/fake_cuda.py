"""The lowest calls that torch makes of CUDA and NCCL, without a GPU: they record on which device the calling thread was, and do nothing.

What lies above them is torch's own and the runtime's: `torch.cuda.device`, `torch.cuda.set_device`, and all that this package does. As in
CUDA, a thread that has just started is on device 0, whichever another thread has chosen. This shows which calls are made, where, and in
which order, and nothing of what CUDA or NCCL would do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode


class FakeStream:
    """A stream of the device on which it was made."""

    def __init__(self, cuda: FakeCuda, device: torch.device | None = None, priority: int = 0) -> None:
        assert device is None or device.index is not None
        self.cuda, self.priority = cuda, priority
        self.index = cuda.current_index if device is None else device.index
        self.cuda_stream = id(self)
        cuda.note("stream made")

    def wait_event(self, event: FakeEvent) -> None:
        """Record it."""
        self.cuda.note("wait event", self, event.stream)

    def wait_stream(self, other: FakeStream) -> None:
        """Record it."""
        self.cuda.note("wait stream", self, other)


class FakeEvent:
    """A place in a stream, which it has passed once `FakeCuda.runs` is set."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.stream = cuda, cuda.stream_of(cuda.current_index)

    def record(self, stream: FakeStream | None = None) -> None:
        """Record it."""
        self.stream = stream or self.cuda.stream_of(self.cuda.current_index)
        self.cuda.note("event", self.stream)

    def query(self) -> bool:
        """Return whether the device runs; raise its error."""
        if self.cuda.broken:
            raise torch.AcceleratorError(self.cuda.broken)
        return self.cuda.runs.is_set()


class FakeNccl:
    """torch's backend for NCCL."""

    class Options:
        """What it is made with."""

        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)

    def __init__(self, cuda: FakeCuda, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.cuda, self.store, self.rank, self.size, self.options = cuda, store, rank, size, options  # torch's keeps the store as well
        self.aborted, self.error = False, "SUCCESS"
        self.connected_to: list[torch.device] = []
        self.summed: list[torch.device] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Record it."""
        self.cuda.note("connect")
        self.connected_to.append(device)

    def allreduce(self, tensors: Sequence[torch.Tensor], _opts: object) -> Any:
        """Record where it was called, and where its tensors lie."""
        self.cuda.note("allreduce", self.cuda.stream_of(self.cuda.current_index))
        self.summed += [one.device for one in tensors]
        return SimpleNamespace(wait=lambda: self.cuda.note("wait for the sum"))

    def _comm_ptr(self) -> int:
        """Return an address."""
        self.cuda.note("communicator asked for")
        return 4096 + self.rank

    def get_error(self) -> Any:
        """Return what torch's watchdog has noticed."""
        return SimpleNamespace(name=self.error)

    def abort(self) -> None:
        """Record it."""
        self.aborted = True

    def _group_start(self) -> None:
        self.cuda.note("group start")

    def _group_end(self) -> None:
        self.cuda.note("group end")


class FakeCuda:
    """Takes the place of CUDA and NCCL in a test."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        """What was called, the device of the calling thread then, and the streams that it was about."""
        self.runs, self.broken = threading.Event(), ""
        self.backends: list[FakeNccl] = []
        self._here = threading.local()
        self._default_streams: dict[int, FakeStream] = {}
        for name, value in {"_cuda_setDevice": self._set, "_cuda_getDevice": lambda: self.current_index}.items():
            patched.setattr(torch._C, name, value, raising=False)
        cudart = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        for name, value in {
            "_lazy_init": lambda: None,
            "_exchange_device": self._exchange,
            "_maybe_exchange_device": self._exchange,
            "Stream": lambda device=None, priority=0: FakeStream(self, device, priority),
            "Event": lambda **_: FakeEvent(self),
            "stream": self._on,
            "current_stream": lambda device: self.stream_of(device.index),
            "cudart": lambda: cudart,
            "check_error": lambda status: self.note(f"checked {status}"),
        }.items():
            patched.setattr(torch.cuda, name, value)

        def make(store: dist.Store, rank: int, size: int, options: Any) -> FakeNccl:
            self.note("backend made")
            self.backends.append(FakeNccl(self, store, rank, size, options))
            return self.backends[-1]

        make.Options = FakeNccl.Options  # type: ignore[attr-defined]
        patched.setattr(dist, "ProcessGroupNCCL", make, raising=False)

    def note(self, what: str, *streams: FakeStream) -> None:
        """Record a call."""
        self.calls.append((what, self.current_index, *streams))

    def devices_of(self, what: str) -> list[int]:
        """Return on which device the calling thread was at each call of *what*."""
        return [one[1] for one in self.calls if one[0] == what]

    @property
    def current_index(self) -> int:
        """The device of the calling thread."""
        return int(getattr(self._here, "index", 0))

    def stream_of(self, index: int) -> FakeStream:
        """Return the current stream of the calling thread on a device."""
        current: FakeStream | None = getattr(self._here, "stream", None)
        if current is not None and current.index == index:
            return current
        if index not in self._default_streams:
            self._default_streams[index] = FakeStream(self, torch.device("cuda", index))
        return self._default_streams[index]

    def _set(self, index: int) -> None:
        self._here.index = index

    def _exchange(self, index: int) -> int:
        before = self.current_index
        if index >= 0:
            self._set(index)
        return before

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        """Make *stream* current, and its device, as torch does. Tensors that are made meanwhile have a device and no memory."""
        before, index = getattr(self._here, "stream", None), self._exchange(stream.index)
        self._here.stream = stream
        try:
            with FakeTensorMode():
                yield
        finally:
            self._here.stream = before
            self._set(index)

    def _register(self, address: int, size: int, _flags: int) -> int:
        self.note(f"register {address} {size}")
        return 0

    def _unregister(self, address: int) -> int:
        self.note(f"unregister {address}")
        return 0
