"""How a step spends the time of a device: its own work, and waiting for other ranks. Measured by events in the device's queue.

On the host a wait for a collective returns at once, and the host's clock shows nothing of it. So an event is recorded before the queue
begins to wait for an operation, and one after it; their distance is the time in which the device had to wait. Of DDP, which waits in C++,
the last gradient bucket counts as the begin of one wait that lasts until the step's end. Only the queue of the script's own computation
counts: where a framework waits in queues of its own, as FSDP does, its waits count as work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.runtime.groups.device_library import DeviceEvent, DeviceLibrary

MAX_WAITS: Final = 512
"""Waits of one step that are measured."""


class DeviceTimes:
    """The events of the current step. Written by the training thread and autograd's threads."""

    def __init__(self) -> None:
        self._library: DeviceLibrary | None = None
        self._queue = 0
        self._begin: DeviceEvent | None = None
        self._end: DeviceEvent | None = None
        self._waits: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._last: tuple[DeviceEvent, int] | None = None
        """The begin of the wait that lasts until the end, and the number of waits before it."""

    def begin(self, library: DeviceLibrary | None) -> None:
        """Begin a step whose collectives *library* runs; None: it has none on a device, and nothing is measured."""
        self._library, self._waits, self._last, self._end = library, [], None, None
        self._queue, self._begin = (0, None) if library is None else (library.queue(), library.record())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long the device waits for the operation that its queue begins to wait for within the context."""
        library = self._library
        if library is None or self._end is not None or len(self._waits) >= MAX_WAITS or library.queue() != self._queue:
            yield
            return
        before = library.record()
        yield
        self._waits.append((before, library.record()))

    def last_wait_begins(self) -> None:
        """Note that another operation has started for which the step's end will wait; only the last of a step counts."""
        if self._library is not None and self._end is None and self._library.queue() == self._queue:
            self._last = self._library.record(), len(self._waits)

    def end(self) -> None:
        """End the step's part that ranks compute each for itself: what follows is the vote."""
        if self._library is not None:
            self._end = self._library.record()

    def seconds(self) -> tuple[float, float] | None:
        """Return the seconds of the step on the device, and those in which it waited for other ranks; None if they are not known.

        The device has come to the step's end.
        """
        begin, end, last = self._begin, self._end, self._last
        if begin is None or end is None or not end.query():
            return None
        waits = self._waits if last is None else self._waits[: last[1]]
        talk = sum(before.elapsed_time(after) for before, after in waits) + (last[0].elapsed_time(end) if last is not None else 0.0)
        return begin.elapsed_time(end) / 1000, talk / 1000


_of_this_process = DeviceTimes()


def process_device_times() -> DeviceTimes:
    """Return this process's measurement."""
    return _of_this_process
