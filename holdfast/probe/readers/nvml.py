"""The way to NVML: pynvml where it is installed, started and ended in order, its errors as values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from detectors.evidence import Unknown

TIMEOUT: Final = 10
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
"""Return codes of NVML: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html"""

NOT_THE_NODES: Final = frozenset({2, 3, 4, 12, 13, 20, 25})
"""Codes that speak of the question or of who asks: argument, support, permission, no library or an older one, memory."""


class NoNvml(Exception):
    """NVML cannot be asked."""

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(why, code)
        self.why, self.code = why, code

    def __str__(self) -> str:
        return self.why


@contextmanager
def nvml() -> Iterator[Any]:
    """Start NVML and give its module; raise `NoNvml` with NVML's return code where that speaks of the node."""
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
        with suppress(pynvml.NVMLError):  # nothing is left to be asked
            pynvml.nvmlShutdown()


def bus_of(written: str) -> str:
    """Return a PCI address as sysfs writes it; NVML writes eight digits of domain, and large letters."""
    domain, colon, rest = written.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}{colon}{rest}" if rest else written.strip().lower()


class Device:
    """One GPU to ask; what it does not answer is `Unknown`, and *failed* says when it cannot be used at all."""

    def __init__(self, module: Any, handle: Any) -> None:  # noqa: ANN401 (pynvml ships no types)
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
        """Return the value of the field *name*, one of those that have no function of their own."""
        number = getattr(self._module, name, None)
        if number is None:
            return Unknown(f"{name}: this pynvml does not have it")
        values = self.ask("nvmlDeviceGetFieldValues", [number])
        if isinstance(values, Unknown):
            return values
        if values[0].nvmlReturn:
            return Unknown(f"{name}: {self._module.NVMLError(values[0].nvmlReturn)}")
        return int(values[0].value.uiVal)
