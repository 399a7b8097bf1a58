"""Xids as they happen: NVML's event set, waited for."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, suppress
from typing import Any, Self

from detectors.evidence import Blind
from detectors.readings import Xid
from holdfast.readers.nvml import TIMEOUT, Device, bus_of, nvml


class XidWatch:
    """All GPUs of this node, listened to from entering to leaving; entering raises `NoNvml` where there is nothing to listen to.

    Waiting lets other threads run. Only what happens after entering is told: what was before stands in the kernel's log.
    """

    def __init__(self) -> None:
        self.deaf: dict[int, Blind] = {}
        """GPUs by index that cannot be listened to, and why."""
        self._stack = ExitStack()
        self._bus: dict[int | None, str] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._nvml: Any = stack.enter_context(nvml())
            self._set = self._nvml.nvmlEventSetCreate()
            stack.callback(self._free)
            for index in range(self._nvml.nvmlDeviceGetCount()):
                self._listen(index)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def wait(self, seconds: float) -> Xid | Blind | None:
        """Return the next Xid; None when none came within *seconds*, `Blind` when NVML can no longer wait."""
        try:
            event = self._nvml.nvmlEventSetWait(self._set, max(0, int(seconds * 1000)))
        except self._nvml.NVMLError as error:
            return None if error.value == TIMEOUT else Blind(f"nvmlEventSetWait: {error}")
        return Xid(code=int(event.eventData), bus=self._place(event.device))

    def _listen(self, index: int) -> None:
        """Have events of one GPU; one that cannot be listened to leaves the others heard."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self._bus[_address(handle)] = bus_of(str(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._set)
        except self._nvml.NVMLError as error:
            self.deaf[index] = Blind(f"events of GPU {index}: {error}")

    def _place(self, handle: Any) -> str:  # noqa: ANN401 (pynvml ships no types)
        """Return where the GPU of an event sits; one that has just been lost no longer tells itself."""
        if known := self._bus.get(_address(handle)):
            return known
        place = Device(self._nvml, handle).ask("nvmlDeviceGetPciInfo")
        return "unknown" if isinstance(place, Blind) else bus_of(str(place.busId))

    def _free(self) -> None:
        with suppress(self._nvml.NVMLError):  # nothing is left to be freed
            self._nvml.nvmlEventSetFree(self._set)


def _address(handle: Any) -> int | None:  # noqa: ANN401
    return ctypes.cast(handle, ctypes.c_void_p).value
