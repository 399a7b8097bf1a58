"""Xids as they happen: NVML's event set, waited for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from detectors.evidence import Unknown
from detectors.gpu_readings import Xid
from holdfast.probe.readers.nvml import TIMEOUT, Device, NoNvml, bus_of, nvml


@contextmanager
def listening() -> Iterator[XidWatch]:
    """Listen to all GPUs of this node; raise `NoNvml` where there is nothing to listen to."""
    with nvml() as asked:
        try:
            events = asked.nvmlEventSetCreate()
            count = asked.nvmlDeviceGetCount()
        except asked.NVMLError as error:
            raise NoNvml(f"NVML's events: {error}") from None
        watch = XidWatch(asked, events)
        for index in range(count):
            watch.add(index)
        try:
            yield watch
        finally:
            with suppress(asked.NVMLError):  # nothing is left to be freed
                asked.nvmlEventSetFree(events)


class XidWatch:
    """The events of all GPUs of this node. Waiting lets other threads run.

    Only what happens while somebody listens is told: what was before stands in the kernel's log.
    """

    def __init__(self, asked: Any, events: Any) -> None:  # noqa: ANN401 (pynvml ships no types)
        self._nvml, self._set = asked, events
        self._bus: dict[int | None, str] = {}
        self.deaf: dict[int, Unknown] = {}
        """GPUs by index that cannot be listened to, and why."""

    def wait(self, seconds: float) -> Xid | Unknown | None:
        """Return the next Xid; None when none came within *seconds*, `Unknown` when NVML can no longer wait."""
        try:
            event = self._nvml.nvmlEventSetWait(self._set, max(0, int(seconds * 1000)))
        except self._nvml.NVMLError as error:
            return None if error.value == TIMEOUT else Unknown(f"nvmlEventSetWait: {error}")
        return Xid(code=int(event.eventData), bus=self._place(event.device))

    def add(self, index: int) -> None:
        """Have events of one GPU; one that cannot be listened to leaves the others heard."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self._bus[_address(handle)] = bus_of(str(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._set)
        except self._nvml.NVMLError as error:
            self.deaf[index] = Unknown(f"events of GPU {index}: {error}")

    def _place(self, handle: Any) -> str:  # noqa: ANN401 (pynvml ships no types)
        """Return where the GPU of an event sits; one that has just been lost no longer tells itself."""
        if known := self._bus.get(_address(handle)):
            return known
        place = Device(self._nvml, handle).ask("nvmlDeviceGetPciInfo")
        return "unknown" if isinstance(place, Unknown) else bus_of(str(place.busId))


def _address(handle: Any) -> int | None:  # noqa: ANN401
    return ctypes.cast(handle, ctypes.c_void_p).value
