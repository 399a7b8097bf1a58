"""The thread that copies: slice after slice while training waits, and the rest before the state may change.

One slice is some tenth of a millisecond of work without the interpreter's lock, so that a wait that ends is hardly ever lengthened. The
checksum of a slice is computed from what is copied, on the device where it lies, and never from the copy: it judges the copy too.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.snapshots.checksum import device_sum, sum_of
from holdfast.runtime.telemetry.wait_windows import WaitWindows

_log = logging.getLogger("holdfast.runtime")

_MASK: Final = (1 << 64) - 1
PACE: Final = 0.001
"""Seconds between two looks at the time, where copies are spread over a step."""
NICE: Final = 10
"""How far the thread steps back behind those that compute, where there are more of them than cores."""
NEWS: Final = 16 * 2**20
"""Bytes after which it is told how far a copy is: who reads along need not wait for its end."""


class Task(NamedTuple):
    """A slice to copy: flat views of the bytes of the tensors that it goes through, where they go in the file, and how many they are."""

    sources: tuple[Tensor, ...]
    begin: int
    size: int


@dataclass(slots=True)
class CopyWork:
    """One snapshot's copying, and what became of it."""

    tasks: Sequence[Task]
    opened: Callable[[CopyWork], Tensor | None]
    """Called once, by whoever copies the first slice: gives the data of the slot as bytes, or nothing where none can be had."""
    told: Callable[[int], None]
    """Told now and then how many bytes are there."""
    ended: Callable[[CopyWork], None]
    """Called once, by whoever copies the last slice."""
    target: Tensor | None = None
    sums: list[int] = field(default_factory=list)
    overlapped: float = 0.0
    """Seconds of copying inside of windows."""
    seconds: float = 0.0
    """Seconds of copying in all, of this processor's time: who must step back for others does not copy meanwhile."""
    tail: float = 0.0
    """Seconds of it in the training thread, when the state was about to change."""
    spans: list[tuple[float, float, bool]] = field(default_factory=list)
    """When was copied: begin, end, and whether training waited."""
    gate: Callable[[int], int] = lambda _window: 1 << 60
    """Says up to which slice may be copied in the window of that number."""
    beside: float = 0.0
    """Seconds over which to spread the copying beside what training does, where waits cannot be seen; 0: in windows only."""
    next: int = 0
    done: bool = False
    given_up: bool = False


class Copier:
    """Copies one snapshot at a time."""

    def __init__(self, idle: WaitWindows, *, device: torch.device) -> None:
        self._idle = idle
        self._wake = threading.Event()
        self._lock = threading.Lock()
        """Held for the length of one slice: who holds it takes the next one."""
        self._work: CopyWork | None = None
        self._mover = _Device(device) if device.type == "cuda" else _HostCopier()
        self._thread: threading.Thread | None = None

    def begin(self, work: CopyWork) -> None:
        """Copy *work* from now on."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="holdfast-copier", daemon=True)
            self._thread.start()
        self._mover.follow()
        self._work = work
        self._idle.wake = None if work.beside else self._wake
        if work.beside or self._idle.open:
            self._wake.set()

    def finish(self, seconds: float | None = None) -> bool:
        """Copy what is left in the calling thread, for at most about *seconds*; tell whether all is copied now.

        Called before the state changes; what is not copied by then never will be.
        """
        work, self._idle.wake = self._work, None
        self._wake.clear()
        if work is None:
            return True
        until = None if seconds is None else time.perf_counter() + seconds
        while not work.done and not work.given_up:
            if until is not None and time.perf_counter() >= until:
                work.given_up = True
                break
            with self._lock:
                self._one(work, overlapped=False)
        with self._lock:  # the other thread may be in the middle of the last slice
            self._work = None
        self._mover.settle()
        return work.done

    def give_up(self) -> None:
        """Copy no more of the present snapshot; when this returns nothing reads the state."""
        work, self._idle.wake = self._work, None
        if work is not None:
            work.given_up = True
        with self._lock:
            self._work = None
        self._mover.settle()

    def _run(self) -> None:
        _step_back()
        while True:
            self._wake.wait()
            work = self._work
            if work is None or not self._turn(work):
                self._rest(work)

    def _turn(self, work: CopyWork) -> bool:
        """Copy one slice if there is leave to; tell whether there may be leave for another one."""
        if work.done or work.given_up or work.next >= self._leave(work):
            return False
        with self._lock:
            if work is not self._work or not (self._idle.open or work.beside):
                return False
            self._one(work, overlapped=True)
        return True

    def _leave(self, work: CopyWork) -> int:
        """Return up to which slice may be copied now."""
        if not work.beside:
            return work.gate(self._idle.number)
        elapsed = time.perf_counter() - self._idle.step_began
        return len(work.tasks) if elapsed >= work.beside else int(len(work.tasks) * elapsed / work.beside) + 1

    def _rest(self, work: CopyWork | None) -> None:
        """Wait for the next window, or for the time of the next slice."""
        if work is not None and work.beside and not (work.done or work.given_up):
            time.sleep(PACE)
            return
        self._wake.clear()
        if work is not None and self._idle.open and not (work.done or work.given_up) and work.next < self._leave(work):
            self._wake.set()  # opened in this very moment

    def _one(self, work: CopyWork, *, overlapped: bool) -> None:
        """Copy the next slice."""
        if work.done or work.given_up:
            return
        begin, used = time.perf_counter(), time.thread_time()
        try:
            if work.target is None:
                work.target = work.opened(work)
                work.given_up = work.target is None
                begin, used = time.perf_counter(), time.thread_time()  # memory that is mapped for the first time takes longer than any copy
            if not work.given_up:
                self._copy_next(work)
        except Exception:  # noqa: BLE001 (whatever it is, training goes on without this snapshot)
            _log.exception("a snapshot in memory is given up")
            work.given_up, work.done = True, False
        self._account(work, begin, time.thread_time() - used, overlapped=overlapped)

    def _copy_next(self, work: CopyWork) -> None:
        assert work.target is not None
        if work.next < len(work.tasks):
            task = work.tasks[work.next]
            work.sums.append(self._mover.copy(task, work.target))
            work.next += 1
            there = task.begin + task.size
            if there // NEWS != task.begin // NEWS:
                work.told(there)
        if work.next >= len(work.tasks):
            work.done = True
            work.ended(work)

    def _account(self, work: CopyWork, begin: float, used: float, *, overlapped: bool) -> None:
        """Note what a slice has cost, and whether training waited meanwhile."""
        end = time.perf_counter()
        waited = overlapped and (self._idle.open or bool(work.beside))
        work.seconds += used
        if not overlapped:
            work.tail += used
        elif waited:
            work.overlapped += used
        else:  # the wait ended meanwhile
            work.overlapped += used * min(1.0, max(0.0, self._idle.left - begin) / (end - begin))
        if work.spans and work.spans[-1][2] == waited and begin - work.spans[-1][1] < 1e-4:  # noqa: PLR2004 (one after the other)
            work.spans[-1] = (work.spans[-1][0], end, waited)
        else:
            work.spans.append((begin, end, waited))


def _step_back() -> None:
    """Let whoever computes go before this thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of a thread alone, as Linux has it


class _HostCopier:
    """Copies in the memory of the host."""

    def copy(self, task: Task, target: Tensor) -> int:
        """Copy a slice; return its sum."""
        source = task.sources[0] if len(task.sources) == 1 else torch.cat(task.sources)
        ctypes.memmove(target.data_ptr() + task.begin, source.data_ptr(), task.size)  # without the interpreter's lock
        return sum_of(source)

    def follow(self) -> None:
        """Nothing to wait for: what training wrote is there."""

    def settle(self) -> None:
        """Nothing is under way."""


class _Device:
    """Copies from a GPU into pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device, priority=0)
        self._pinned: dict[int, int] = {}

    def follow(self) -> None:
        """Copy only after all that training has asked of the device so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, task: Task, target: Tensor) -> int:
        """Copy a slice and wait for it; return the sum of its source, which the device computes."""
        if self._pinned.get(target.data_ptr()) != target.numel():  # only from pinned memory do copies run beside kernels
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(target.data_ptr(), target.numel(), 0))
            self._pinned[target.data_ptr()] = target.numel()
        part = target[task.begin : task.begin + task.size]
        with torch.cuda.stream(self._stream):
            sources = [one.to(self._device, non_blocking=True) for one in task.sources]  # numbers of steps are on the host
            source = sources[0] if len(sources) == 1 else torch.cat(sources)
            part.copy_(source, non_blocking=True)
            told = device_sum(source).to("cpu", non_blocking=True)
        self._stream.synchronize()
        return int(told) & _MASK

    def settle(self) -> None:
        """Let kernels that change the state wait for copies under way."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def slot_tensor(data: memoryview) -> Tensor:
    """Return the bytes of a slot as a tensor over the same memory."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
