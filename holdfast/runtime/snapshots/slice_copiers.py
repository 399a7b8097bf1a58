"""Copy slices of a snapshot into host memory, and compute the checksum of each from its source: from host memory, and from a device."""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.memstore.shared_memory import SLICE_BYTES
from holdfast.runtime.snapshots.checksum import device_sums, sum_of
from holdfast.runtime.snapshots.device_runtime import CopyEvent, DeviceRuntime

_log = logging.getLogger("holdfast.runtime")

BATCH: Final = 32
"""Slices that are copied from a device at once: smaller copies take longer to launch than to run."""
BUFFERS: Final = 2
"""Buffers on the device that take turns: one is filled and summed while the other is copied to the host."""
DEPTH: Final = BUFFERS + 1
"""Batches under way at a time: one waits for its buffer, so that the device has work while the host launches the next."""
_MASK: Final = (1 << 64) - 1


class Task(NamedTuple):
    """A slice to copy: flat byte views of the tensors that it spans, its offset in the file, and its size."""

    sources: tuple[Tensor, ...]
    begin: int
    size: int


class SliceCopier(Protocol):
    """Copies consecutive slices. Called by one thread at a time."""

    @property
    def batch(self) -> int:
        """Most slices of one `submit`."""
        ...

    @property
    def in_flight(self) -> bool:
        """Whether copies are under way."""
        ...

    def submit(self, tasks: Sequence[Task], target: Tensor) -> None:
        """Begin to copy *tasks*, at most `batch` consecutive ones, into *target*, the memory of the whole snapshot."""
        ...

    def arrived(self, *, wait: bool) -> list[tuple[Task, int]]:
        """Return the slices that have arrived since the last call, each with the checksum of its source; *wait* for all of them."""
        ...

    def device_seconds(self) -> float:
        """Return the seconds that the device has spent on the slices that have arrived since the last call; 0 for host memory."""
        ...

    def drop(self) -> None:
        """Wait until no copy is under way, and forget what has arrived."""
        ...

    def pin(self, data: memoryview) -> None:
        """Prepare the memory of a slot, which was mapped just now."""
        ...

    def unpin(self, data: memoryview) -> None:
        """Undo `pin`: the memory is about to be unmapped."""
        ...

    def wait_for_training(self) -> None:
        """Copy only what training has written by now."""
        ...

    def hold_training(self) -> None:
        """Have training change the state only after the copies that are under way."""
        ...

    def begin_pause(self) -> None:
        """Note that training has come to the next change of the state."""
        ...

    def pause(self) -> float:
        """Return the seconds for which the change has been held up since `begin_pause`."""
        ...

    def is_capturing(self) -> bool:
        """Return whether the calling thread captures a CUDA graph."""
        ...


class HostCopier:
    """Copies within host memory."""

    batch, in_flight = 1, False

    def __init__(self) -> None:
        self._arrived: list[tuple[Task, int]] = []
        self._paused_at = 0.0

    def submit(self, tasks: Sequence[Task], target: Tensor) -> None:
        """Copy at once."""
        for task in tasks:
            source = task.sources[0] if len(task.sources) == 1 else torch.cat(task.sources)
            ctypes.memmove(target.data_ptr() + task.begin, source.data_ptr(), task.size)  # without the interpreter's lock
            self._arrived.append((task, sum_of(source)))

    def arrived(self, *, wait: bool) -> list[tuple[Task, int]]:  # noqa: ARG002 (all of it has arrived)
        """Return what was copied."""
        found, self._arrived = self._arrived, []
        return found

    def device_seconds(self) -> float:
        """Return 0."""
        return 0.0

    def drop(self) -> None:
        """Forget what was copied."""
        self._arrived = []

    def pin(self, data: memoryview) -> None:
        """Do nothing."""

    def unpin(self, data: memoryview) -> None:
        """Do nothing."""

    def wait_for_training(self) -> None:
        """Do nothing: what training wrote is in memory."""

    def hold_training(self) -> None:
        """Do nothing: no copy is under way."""

    def begin_pause(self) -> None:
        """Note the time."""
        self._paused_at = time.perf_counter()

    def pause(self) -> float:
        """Return the time since."""
        return time.perf_counter() - self._paused_at

    def is_capturing(self) -> bool:
        """Return False."""
        return False


@dataclass(slots=True)
class _Batch:
    """Slices under way, between two events."""

    tasks: Sequence[Task]
    sums: Tensor
    """Their checksums, in pinned memory, once `end` has passed."""
    collected_sums: Tensor
    """The same on the device: kept until then, as another stream reads them than the one that they were made on."""
    begin: CopyEvent
    end: CopyEvent


class DeviceCopier:
    """Copies from a device into pinned memory, beside what training does there.

    A batch is collected in a buffer on the device, where its checksums are computed; then both are copied to the host. So a checksum is
    that of the bytes before they leave the device, and needs no second pass over host memory. The two happen on a stream each, and
    `BUFFERS` take turns: while one is copied, the next batch is collected. A buffer is filled again only after it was copied. Buffers and
    intermediate values take about four times a batch of device memory.
    """

    batch = BATCH

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._flying: deque[_Batch] = deque()
        self._buffers: list[Tensor] = []
        self._copied: list[CopyEvent | None] = [None] * BUFFERS
        """For each buffer, where the copy of what it held last ends."""
        self._submitted = 0
        self._pinned: dict[int, int] = {}
        """Address and size of the memory that is registered."""
        self._warned = False
        self._seconds = 0.0
        self._newest_end: CopyEvent | None = None
        self._training: tuple[CopyEvent, float] | None = None
        """The end of what training had launched, and the time, when `begin_pause` was called."""

    @property
    def in_flight(self) -> bool:
        """Return whether a batch is under way."""
        return bool(self._flying)

    def submit(self, tasks: Sequence[Task], target: Tensor) -> None:
        """Launch a batch: collect it in the next buffer, sum it, and copy both."""
        runtime, size, at = self._runtime, sum(task.size for task in tasks), self._submitted % BUFFERS
        with runtime.collecting():
            if at == len(self._buffers):
                self._buffers.append(torch.empty(self.batch * SLICE_BYTES, dtype=torch.uint8, device=runtime.device))
            copied = self._copied[at]
            if copied is not None:
                runtime.wait(copied)
            begin = runtime.record()
            buffer = self._buffers[at][: -(-size // SLICE_BYTES) * SLICE_BYTES]
            buffer[size:].zero_()
            offset = 0
            for source in _joined(tasks):
                buffer[offset : offset + len(source)].copy_(source, non_blocking=True)  # some lie on the host: step counters
                offset += len(source)
            collected_sums = device_sums(buffer)
            collected = runtime.record()
        with runtime.on_stream():
            runtime.wait(collected)
            sums = runtime.pinned(len(collected_sums), torch.int64)
            runtime.to_host(sums, collected_sums)
            runtime.to_host(target[tasks[0].begin : tasks[0].begin + size], buffer[:size])
            end = self._copied[at] = runtime.record()
        self._submitted += 1
        self._flying.append(_Batch(tasks, sums, collected_sums, begin, end))

    def arrived(self, *, wait: bool) -> list[tuple[Task, int]]:
        """Return the slices of batches whose end has passed."""
        found: list[tuple[Task, int]] = []
        while self._flying and (wait or len(self._flying) >= DEPTH or self._flying[0].end.query()):
            one = self._flying[0]
            one.end.synchronize()
            self._flying.popleft()
            spent, before, self._newest_end = one.begin.milliseconds_until(one.end), self._newest_end, one.end
            if before is not None:  # the time until the end of the batch before counts for that one
                spent = min(spent, before.milliseconds_until(one.end))
            self._seconds += spent / 1e3
            found += [(task, int(total) & _MASK) for task, total in zip(one.tasks, one.sums, strict=True)]
        return found

    def device_seconds(self) -> float:
        """Return the time for which batches that have arrived were under way."""
        spent, self._seconds = self._seconds, 0.0
        return spent

    def drop(self) -> None:
        """Wait until nothing reads the state or writes to a slot, also for a batch that could be launched only in part."""
        for stream in (self._runtime.collecting, self._runtime.on_stream):
            with stream():
                self._runtime.record().synchronize()
        self._flying.clear()

    def pin(self, data: memoryview) -> None:
        """Register the memory of a slot; without it copies are correct, but hold up training, and that is reported once."""
        address = _address(data)
        try:
            self._runtime.register(address, len(data))
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%d MiB of host memory for snapshots could not be pinned (%s): each copy holds up training, and snapshots are taken "
                    "less often for it. Raise the limit of locked memory (`ulimit -l`), or lower checkpoint.memory.max_memory",
                    len(data) >> 20,
                    error,
                )
        else:
            self._pinned[address] = len(data)

    def unpin(self, data: memoryview) -> None:
        """Undo it."""
        address = _address(data)
        if self._pinned.pop(address, None) is not None:
            self.drop()
            self._runtime.unregister(address)

    def wait_for_training(self) -> None:
        """Copy after all that training has launched."""
        self._runtime.wait_for_training()

    def hold_training(self) -> None:
        """Have training wait for what was launched."""
        self._runtime.hold_training()

    def begin_pause(self) -> None:
        """Note what the device has to do before the change: the host may be far ahead of it."""
        self._training = self._runtime.record(), time.perf_counter()

    def pause(self) -> float:
        """Return the time for which the device has had nothing to do for training; 0 while it has not come to the change."""
        assert self._training is not None
        came, begun = self._training
        if not came.query():
            return 0.0
        with self._runtime.on_stream():
            now = self._runtime.record()
        now.synchronize()
        return min(time.perf_counter() - begun, max(0.0, came.milliseconds_until(now) / 1e3))

    def is_capturing(self) -> bool:
        """Ask the runtime."""
        return self._runtime.is_capturing()


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _joined(tasks: Sequence[Task]) -> Iterator[Tensor]:
    """Yield the bytes of *tasks* in their order; what lies side by side in one tensor, as one: a large tensor is one copy."""
    current: Tensor | None = None
    for task in tasks:
        for source in task.sources:
            if (
                current is not None
                and current.data_ptr() + len(current) == source.data_ptr()
                and current.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            ):
                current = current.as_strided((len(current) + len(source),), (1,))
                continue
            if current is not None:
                yield current
            current = source
    if current is not None:
        yield current
