"""The thread that copies a snapshot: slice by slice while training waits, and the rest before the state may change.

A slice takes about 0.1 ms without the interpreter's lock, so that it hardly delays the end of a wait; from a device many are copied at
once, beside training. The checksum of a slice is computed from its source, on the device where it is, and never from the copy: so it also
detects damage in the copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from holdfast.runtime.snapshots.device_runtime import DeviceRuntime
from holdfast.runtime.snapshots.slice_copiers import DeviceCopier, HostCopier, SliceCopier, Task
from holdfast.runtime.telemetry.wait_windows import WaitWindows

_log = logging.getLogger("holdfast.runtime")

SPREAD_PAUSE: Final = 0.001
"""Seconds between two checks of the time when copies are spread over a step."""
NICE: Final = 10
"""Niceness of the thread, so that computing threads have priority when there are more of them than cores."""
PROGRESS_BYTES: Final = 16 * 2**20
"""Bytes between two notifications about the progress of a copy, for readers that follow it."""


@dataclass(slots=True)
class CopyWork:
    """The copying of one snapshot, and what it has cost."""

    tasks: Sequence[Task]
    open_target: Callable[[CopyWork], Tensor | None]
    """Called once, before the first slice: returns the data of the slot as bytes, or None when no slot is available."""
    on_progress: Callable[[int], None]
    """Called now and then with the number of bytes copied."""
    on_end: Callable[[CopyWork], None]
    """Called once, after the last slice."""
    target: Tensor | None = None
    sums: list[int] = field(default_factory=list)
    overlapped: float = 0.0
    """Seconds of copying inside windows."""
    seconds: float = 0.0
    """Seconds of copying in all: of the processor, and of the device where copies run on one."""
    tail: float = 0.0
    """Seconds of it in the training thread, when the state was about to change."""
    spans: list[tuple[float, float, bool]] = field(default_factory=list)
    """Periods of copying: begin, end, and whether training waited."""
    gate: Callable[[int], int] = lambda _window: 1 << 60
    """Returns up to which slice may be copied in the window of that number."""
    spread: float = 0.0
    """Seconds over which the copying is spread concurrently with training, where waits are not visible; 0: in windows only."""
    next: int = 0
    """The first slice whose copying has not begun; those before it that have arrived have their checksum in `sums`."""
    done: bool = False
    given_up: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing more is copied."""
        return self.done or self.given_up


class Copier:
    """Copies one snapshot at a time."""

    def __init__(self, waits: WaitWindows, runtime: DeviceRuntime | None = None) -> None:
        """*runtime*: that of the device from which it copies; None where the state lies in host memory."""
        self._waits = waits
        self._wake = threading.Event()
        self._lock = threading.Lock()
        """Held for the length of one slice: its holder takes the next one."""
        self._work: CopyWork | None = None
        self.slices: SliceCopier = HostCopier() if runtime is None else DeviceCopier(runtime)
        self._thread: threading.Thread | None = None

    def begin(self, work: CopyWork) -> None:
        """Start to copy *work*."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="holdfast-copier", daemon=True)
            self._thread.start()
        self.slices.wait_for_training()
        self._work = work
        self._waits.wake = None if work.spread else self._wake
        if work.spread or self._waits.open:
            self._wake.set()

    def finish(self, seconds: float | None = None) -> bool:
        """Copy the rest in the calling thread, for at most about *seconds*; return whether everything is copied.

        Called before the state changes: what is not copied by then is lost.
        """
        work, self._waits.wake = self._work, None
        self._wake.clear()
        if work is None:
            return True
        until = None if seconds is None else time.perf_counter() + seconds
        while not work.ended:
            if until is not None and time.perf_counter() >= until:
                work.given_up = True
                break
            with self._lock:
                self._copy_slice(work, len(work.tasks), overlapped=False)
        with self._lock:  # the other thread may be in the middle of the last slice
            self._work = None
            self.slices.drop()
        self.slices.hold_training()
        return work.done

    def give_up(self) -> None:
        """Stop copying; when this returns nothing reads the state."""
        work, self._waits.wake = self._work, None
        if work is not None:
            work.given_up = True
        with self._lock:
            self._work = None
            self.slices.drop()
        self.slices.hold_training()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread only, on Linux
        while True:
            self._wake.wait()
            work = self._work
            if work is None or not self._copy_if_allowed(work):
                self._rest(work)

    def _copy_if_allowed(self, work: CopyWork) -> bool:
        """Copy a slice, or as many as are copied at once, if that is allowed now; return whether another one may be."""
        allowed = self._allowed(work)
        if work.ended or (work.next >= allowed and not self.slices.in_flight):
            return False
        with self._lock:
            if work is not self._work or not (self._waits.open or work.spread):
                return False
            self._copy_slice(work, allowed, overlapped=True)
        return True

    def _allowed(self, work: CopyWork) -> int:
        """Return up to which slice may be copied now."""
        if not work.spread:
            return work.gate(self._waits.number)
        elapsed = time.perf_counter() - self._waits.step_began
        return len(work.tasks) if elapsed >= work.spread else int(len(work.tasks) * elapsed / work.spread) + 1

    def _rest(self, work: CopyWork | None) -> None:
        """Wait for the next window, or for the time of the next slice."""
        if work is not None and work.spread and not work.ended:
            time.sleep(SPREAD_PAUSE)
            return
        self._wake.clear()
        if work is not None and self._waits.open and not work.ended and work.next < self._allowed(work):
            self._wake.set()  # a window was opened just now

    def _copy_slice(self, work: CopyWork, allowed: int, *, overlapped: bool) -> None:
        """Copy the next slices, none from *allowed* on, and take note of those that have arrived; on an error give this snapshot up."""
        if work.ended:
            return
        begin, used = time.perf_counter(), time.thread_time()
        try:
            if work.target is None:
                work.target = work.open_target(work)
                work.given_up = work.target is None
                begin, used = time.perf_counter(), time.thread_time()  # mapping memory for the first time takes longer than any copy
            if work.target is not None and not work.given_up:
                batch = work.tasks[work.next : min(work.next + self.slices.batch, allowed)]
                if batch:
                    self.slices.submit(batch, work.target)
                    work.next += len(batch)
                self._note_arrived(work, self.slices.arrived(wait=not batch or work.next >= len(work.tasks)))
        except Exception:  # noqa: BLE001 (training goes on without this snapshot, whatever the error is)
            _log.exception("a snapshot in memory is given up")
            work.given_up, work.done = True, False
        self._account(work, begin, time.thread_time() - used + self.slices.device_seconds(), overlapped=overlapped)

    def _note_arrived(self, work: CopyWork, arrived: Sequence[tuple[Task, int]]) -> None:
        """Keep the checksums of slices that have arrived, and end the work with the last one."""
        for task, checksum in arrived:
            work.sums.append(checksum)
            copied = task.begin + task.size
            if copied // PROGRESS_BYTES != task.begin // PROGRESS_BYTES:
                work.on_progress(copied)
        if len(work.sums) >= len(work.tasks):
            work.done = True
            work.on_end(work)

    def _account(self, work: CopyWork, begin: float, used: float, *, overlapped: bool) -> None:
        """Record what a slice has cost, and whether training waited meanwhile."""
        end = time.perf_counter()
        waited = overlapped and (self._waits.open or bool(work.spread))
        work.seconds += used
        if not overlapped:
            work.tail += used
        elif waited:
            work.overlapped += used
        else:  # the wait ended meanwhile
            work.overlapped += used * min(1.0, max(0.0, self._waits.closed_at - begin) / (end - begin))
        if work.spans and work.spans[-1][2] == waited and begin - work.spans[-1][1] < 1e-4:  # noqa: PLR2004 (consecutive)
            work.spans[-1] = (work.spans[-1][0], end, waited)
        else:
            work.spans.append((begin, end, waited))


def slot_tensor(data: memoryview) -> Tensor:
    """Return the bytes of a slot as a tensor over the same memory."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
