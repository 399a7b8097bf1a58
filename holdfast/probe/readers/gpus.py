"""Read NVIDIA GPUs: what NVML reports of each, and what the kernel sees on the PCI bus without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.gpu_readings import (
    Clocks,
    Ecc,
    Fabric,
    Gpu,
    GpuProcess,
    GpuReading,
    Heat,
    NvLink,
    Pcie,
    Power,
    RemappedRows,
    RetiredPages,
)
from holdfast.probe.readers import files
from holdfast.probe.readers.nvml import Device, NoNvml, bus_of, nvml

T = TypeVar("T")

NVIDIA: Final = 0x10DE
DISPLAYS: Final = frozenset({0x0300, 0x0302})
"""PCI classes of a GPU, with and without a display."""
JOB: Final = "HOLDFAST_JOB="
"""The start of a variable that an agent sets for each worker."""


def read_gpus(root: Path = Path("/")) -> GpuReading:
    """Return the state of this node's GPUs and their driver."""
    on_bus, module = gpus_on_bus(root), files.text(root / "sys/module/nvidia/version")
    try:
        with nvml() as asked:
            driver, count = _system(asked, "nvmlSystemGetDriverVersion"), _system(asked, "nvmlDeviceGetCount")
            gpus = count if isinstance(count, Unknown) else tuple(_gpu(asked, index, root) for index in range(count))
            return GpuReading(on_bus=on_bus, module_version=module, driver_version=driver, gpus=gpus)
    except NoNvml as error:
        return GpuReading(on_bus=on_bus, module_version=module, failed=error.code, gpus=Unknown(error.why))


def gpus_on_bus(root: Path) -> tuple[str, ...] | Unknown:
    """Return the PCI addresses of NVIDIA's GPUs."""
    devices = files.entries(root / "sys/bus/pci/devices")
    if isinstance(devices, Unknown):
        return devices
    return tuple(device.name for device in devices if files.number(device / "vendor") == NVIDIA and pci_class(device) in DISPLAYS)


def pci_class(device: Path) -> int | None:
    """Return the class of a PCI device without its programming interface; None where it cannot be read."""
    found = files.number(device / "class")
    return None if isinstance(found, Unknown) else found >> 8


def _system(asked: Any, function: str) -> Any:  # noqa: ANN401 (pynvml has no types)
    try:
        return getattr(asked, function)()
    except asked.NVMLError as error:
        return Unknown(f"{function}: {error}")


def _gpu(asked: Any, index: int, root: Path) -> Gpu:  # noqa: ANN401
    try:
        device = Device(asked, asked.nvmlDeviceGetHandleByIndex(index))
    except asked.NVMLError as error:
        return Gpu(index=index, bus=Unknown(f"nvmlDeviceGetHandleByIndex: {error}"), failed=int(error.value))
    parts: dict[str, Any] = {
        "bus": _known(device.ask("nvmlDeviceGetPciInfo"), lambda place: bus_of(str(place.busId))),
        "uuid": device.ask("nvmlDeviceGetUUID"),
        "name": device.ask("nvmlDeviceGetName"),
        "recovery_action": device.field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        "ecc_on": _known(device.ask("nvmlDeviceGetEccMode"), lambda mode: bool(mode[0])),
        "ecc": _ecc(device),
        "rows": _rows(device),
        "pages": _pages(device),
        "heat": _heat(device),
        "power": _power(device),
        "clocks": _clocks(device),
        "utilization": _known(device.ask("nvmlDeviceGetUtilizationRates"), lambda rates: int(rates.gpu)),
        "memory_used": _known(device.ask("nvmlDeviceGetMemoryInfo"), lambda memory: int(memory.used)),
        "pcie": _pcie(device),
        "links": _links(device),
        "fabric": _fabric(device),
        "persistence": _known(device.ask("nvmlDeviceGetPersistenceMode"), bool),
        "processes": _processes(device, root),
    }
    return Gpu(index=index, failed=device.failed, **parts)


def _known(answer: Any, convert: Callable[[Any], T]) -> T | Unknown:  # noqa: ANN401
    return answer if isinstance(answer, Unknown) else convert(answer)


def _ecc(device: Device) -> Ecc:
    def errors(kind: str, since: str) -> Any:  # noqa: ANN401
        return device.ask(
            "nvmlDeviceGetTotalEccErrors", device.constant(f"NVML_MEMORY_ERROR_TYPE_{kind}"), device.constant(f"NVML_{since}_ECC")
        )

    return Ecc(
        volatile_corrected=errors("CORRECTED", "VOLATILE"),
        volatile_uncorrected=errors("UNCORRECTED", "VOLATILE"),
        aggregate_corrected=errors("CORRECTED", "AGGREGATE"),
        aggregate_uncorrected=errors("UNCORRECTED", "AGGREGATE"),
    )


def _rows(device: Device) -> RemappedRows | Unknown:
    answer = device.ask("nvmlDeviceGetRemappedRows")
    if isinstance(answer, Unknown):
        return answer
    corrected, uncorrected, pending, failed = answer
    banks = _known(device.ask("nvmlDeviceGetRowRemapperHistogram"), lambda histogram: int(histogram.none))
    return RemappedRows(
        corrected=corrected, uncorrected=uncorrected, pending=bool(pending), failed=bool(failed), banks_without_spares=banks
    )


def _pages(device: Device) -> RetiredPages | Unknown:
    causes = ("MULTIPLE_SINGLE_BIT_ECC_ERRORS", "DOUBLE_BIT_ECC_ERROR")
    single, double = (device.ask("nvmlDeviceGetRetiredPages", device.constant(f"NVML_PAGE_RETIREMENT_CAUSE_{cause}")) for cause in causes)
    pending = device.ask("nvmlDeviceGetRetiredPagesPendingStatus")
    for answer in (single, double, pending):
        if isinstance(answer, Unknown):
            return answer
    return RetiredPages(single_bit=len(single), double_bit=len(double), pending=bool(pending))


def _heat(device: Device) -> Heat:
    def limit(name: str) -> Any:  # noqa: ANN401
        return device.ask("nvmlDeviceGetTemperatureThreshold", device.constant(f"NVML_TEMPERATURE_THRESHOLD_{name}"))

    return Heat(
        gpu=device.ask("nvmlDeviceGetTemperature", device.constant("NVML_TEMPERATURE_GPU")),
        memory=device.field("NVML_FI_DEV_MEMORY_TEMP"),
        slowdown_at=limit("SLOWDOWN"),
        shutdown_at=limit("SHUTDOWN"),
    )


def _power(device: Device) -> Power:
    return Power(
        draw=device.ask("nvmlDeviceGetPowerUsage"),
        limit=device.ask("nvmlDeviceGetEnforcedPowerLimit"),
        default_limit=device.ask("nvmlDeviceGetPowerManagementDefaultLimit"),
    )


def _clocks(device: Device) -> Clocks:
    sm = device.constant("NVML_CLOCK_SM")
    return Clocks(
        sm=device.ask("nvmlDeviceGetClockInfo", sm),
        sm_most=device.ask("nvmlDeviceGetMaxClockInfo", sm),
        memory=device.ask("nvmlDeviceGetClockInfo", device.constant("NVML_CLOCK_MEM")),
        reasons=device.ask("nvmlDeviceGetCurrentClocksEventReasons"),
        performance_state=device.ask("nvmlDeviceGetPerformanceState"),
    )


def _pcie(device: Device) -> Pcie:
    return Pcie(
        generation=device.ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        generation_most=device.ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        width=device.ask("nvmlDeviceGetCurrPcieLinkWidth"),
        width_most=device.ask("nvmlDeviceGetMaxPcieLinkWidth"),
        replays=device.ask("nvmlDeviceGetPcieReplayCounter"),
    )


def _links(device: Device) -> tuple[NvLink, ...] | Unknown:
    found: list[NvLink] = []
    for link in range(device.constant("NVML_NVLINK_MAX_LINKS")):
        state = device.ask("nvmlDeviceGetNvLinkState", link)
        if isinstance(state, Unknown):  # past its last link, or none at all
            return tuple(found) or state
        found.append(_link(device, link, active=bool(state)))
    return tuple(found)


def _link(device: Device, link: int, *, active: bool) -> NvLink:
    def errors(kind: str) -> Any:  # noqa: ANN401
        return device.ask("nvmlDeviceGetNvLinkErrorCounter", link, device.constant(f"NVML_NVLINK_ERROR_DL_{kind}"))

    return NvLink(
        link=link,
        active=active,
        replays=errors("REPLAY"),
        recoveries=errors("RECOVERY"),
        crc_flit=errors("CRC_FLIT"),
        crc_data=errors("CRC_DATA"),
    )


def _fabric(device: Device) -> Fabric | Unknown:
    """Ask with the newest version of the call, which fills a buffer of the caller."""
    try:
        buffer = device.constant("c_nvmlGpuFabricInfoV_t")()
    except AttributeError:
        return Unknown("nvmlDeviceGetGpuFabricInfoV: this pynvml does not have it")
    answer = device.ask("nvmlDeviceGetGpuFabricInfoV", device.constant("byref")(buffer))
    return answer if isinstance(answer, Unknown) else Fabric(state=int(buffer.state), status=int(buffer.status))


def _processes(device: Device, root: Path) -> tuple[GpuProcess, ...] | Unknown:
    answer = device.ask("nvmlDeviceGetComputeRunningProcesses")
    if isinstance(answer, Unknown):
        return answer
    unknown = Unknown("the driver does not report it")
    return tuple(
        GpuProcess(
            pid=int(one.pid), memory=unknown if one.usedGpuMemory is None else int(one.usedGpuMemory), job=job_of(root, int(one.pid))
        )
        for one in answer
    )


def job_of(root: Path, pid: int) -> str | Unknown:
    """Return the job of a process, from its environment; empty for a process that is no worker."""
    found = files.text(root / "proc" / str(pid) / "environ")
    if isinstance(found, Unknown):
        return found
    mine = (entry.removeprefix(JOB) for entry in found.split("\0") if entry.startswith(JOB))
    return next(mine, "")
