"""Ask NVML about GPUs through pynvml, where it is installed, and wait for Xids; errors are values."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.gpu_readings import Xid

TIMEOUT: Final = 10
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
"""Return codes of NVML: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html"""
NOT_THE_NODES: Final = frozenset({2, 3, 4, 12, 13, 20, 25})
"""Codes about the question or the caller: argument, support, permission, no library or an older one, memory."""


class NoNvml(Exception):
    """NVML cannot be used."""

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(why, code)
        self.why, self.code = why, code

    def __str__(self) -> str:
        return self.why


@contextmanager
def nvml() -> Iterator[Any]:
    """Start NVML and yield its module; raise `NoNvml`, with NVML's return code where that is a fault of the node."""
    try:
        import pynvml  # noqa: PLC0415 (a node may have none, and most of what is read does not need it)
    except ImportError:
        raise NoNvml("the module pynvml (package nvidia-ml-py) is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code = int(error.value)
        raise NoNvml(f"nvmlInit: {error}", 0 if code in NOT_THE_NODES else code) from None
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):  # nothing more will be asked
            pynvml.nvmlShutdown()


def bus_of(written: str) -> str:
    """Return a PCI address as sysfs writes it; NVML writes eight digits of domain, and capital letters."""
    domain, colon, rest = written.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}{colon}{rest}" if rest else written.strip().lower()


class Device:
    """One GPU to ask. What it does not answer is `Unknown`, and *failed* is NVML's code once it cannot be used at all."""

    def __init__(self, module: Any, handle: Any) -> None:  # noqa: ANN401 (pynvml has no types)
        self._module, self._handle = module, handle
        self.failed = 0

    def ask(self, function: str, *arguments: object) -> Any:  # noqa: ANN401 (each function has its own answer)
        """Return the answer of NVML's *function* about this GPU."""
        try:
            return getattr(self._module, function)(self._handle, *arguments)
        except self._module.NVMLError as error:
            if error.value in {GPU_IS_LOST, RESET_REQUIRED}:
                self.failed = int(error.value)
            return Unknown(f"{function}: {error}")
        except AttributeError:
            return Unknown(f"{function}: this pynvml does not have it")

    def constant(self, name: str) -> Any:  # noqa: ANN401
        """Return a constant of pynvml."""
        return getattr(self._module, name)

    def field(self, name: str) -> int | Unknown:
        """Return the value of the field *name*, one of those without a function of their own."""
        number = getattr(self._module, name, None)
        if number is None:
            return Unknown(f"{name}: this pynvml does not have it")
        values = self.ask("nvmlDeviceGetFieldValues", [number])
        if isinstance(values, Unknown):
            return values
        if values[0].nvmlReturn:
            return Unknown(f"{name}: {self._module.NVMLError(values[0].nvmlReturn)}")
        return int(values[0].value.uiVal)


@contextmanager
def listening() -> Iterator[XidWatch]:
    """Listen to all GPUs of this node; raise `NoNvml` where that is not possible."""
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
            with suppress(asked.NVMLError):  # it may be freed already
                asked.nvmlEventSetFree(events)


class XidWatch:
    """The events of all GPUs of this node, as they happen; older ones are in the kernel's log. Waiting lets other threads run."""

    def __init__(self, asked: Any, events: Any) -> None:  # noqa: ANN401 (pynvml has no types)
        self._nvml, self._set = asked, events
        self._bus: dict[int | None, str] = {}
        self.unwatched: dict[int, Unknown] = {}
        """GPUs by index whose events cannot be had, and why."""

    def wait(self, seconds: float) -> Xid | Unknown | None:
        """Return the next Xid; None when none came within *seconds*, `Unknown` when NVML can no longer wait."""
        try:
            event = self._nvml.nvmlEventSetWait(self._set, max(0, int(seconds * 1000)))
        except self._nvml.NVMLError as error:
            return None if error.value == TIMEOUT else Unknown(f"nvmlEventSetWait: {error}")
        bus = self._bus.get(_address(event.device))
        if bus is None:
            place = Device(self._nvml, event.device).ask("nvmlDeviceGetPciInfo")  # fails for a GPU that has just been lost
            bus = "unknown" if isinstance(place, Unknown) else bus_of(str(place.busId))
        return Xid(code=int(event.eventData), bus=bus)

    def add(self, index: int) -> None:
        """Watch one GPU; a failure does not affect the others."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self._bus[_address(handle)] = bus_of(str(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._set)
        except self._nvml.NVMLError as error:
            self.unwatched[index] = Unknown(f"events of GPU {index}: {error}")


def _address(handle: Any) -> int | None:  # noqa: ANN401
    return ctypes.cast(handle, ctypes.c_void_p).value
