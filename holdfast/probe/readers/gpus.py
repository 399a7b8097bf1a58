"""NVIDIA GPUs: what NVML tells of each, and what the kernel knows on its bus whatever NVML says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from detectors.evidence import Unknown
from detectors.gpu_readings import Clocks, Ecc, Fabric, Gpu, GpuProcess, GpuReading, Heat, NvLink, Pcie, Power, RemappedRows, RetiredPages
from holdfast.probe.readers import files
from holdfast.probe.readers.nvml import Device, NoNvml, bus_of, nvml

NVIDIA: Final = 0x10DE
DISPLAYS: Final = frozenset({0x0300, 0x0302})
"""PCI classes of a GPU, with and without a screen."""
JOB: Final = "HOLDFAST_JOB="
"""What an agent puts into the environment of each worker."""


def read_gpus(root: Path = Path("/")) -> GpuReading:
    """Return all that can be known of this node's GPUs."""
    on_bus, module = gpus_on_bus(root), files.text(root / "sys/module/nvidia/version")
    try:
        with nvml() as asked:
            driver = _system(asked, "nvmlSystemGetDriverVersion")
            return GpuReading(on_bus=on_bus, module_version=module, driver_version=driver, gpus=_all(asked, root))
    except NoNvml as error:
        return GpuReading(on_bus=on_bus, module_version=module, failed=error.code, gpus=Unknown(error.why))


def gpus_on_bus(root: Path) -> tuple[str, ...] | Unknown:
    """Return the PCI addresses of NVIDIA's GPUs."""
    devices = files.entries(root / "sys/bus/pci/devices")
    if isinstance(devices, Unknown):
        return devices
    return tuple(device.name for device in devices if _is_gpu(device))


def _is_gpu(device: Path) -> bool:
    vendor, kind = files.number(device / "vendor"), files.number(device / "class")
    return vendor == NVIDIA and not isinstance(kind, Unknown) and kind >> 8 in DISPLAYS


def _system(asked: Any, function: str, *arguments: object) -> Any:  # noqa: ANN401 (pynvml ships no types)
    try:
        return getattr(asked, function)(*arguments)
    except asked.NVMLError as error:
        return Unknown(f"{function}: {error}")


def _all(asked: Any, root: Path) -> tuple[Gpu, ...] | Unknown:  # noqa: ANN401
    count = _system(asked, "nvmlDeviceGetCount")
    return count if isinstance(count, Unknown) else tuple(_gpu(asked, index, root) for index in range(count))


def _gpu(asked: Any, index: int, root: Path) -> Gpu:  # noqa: ANN401
    try:
        device = Device(asked, asked.nvmlDeviceGetHandleByIndex(index))
    except asked.NVMLError as error:
        return Gpu(index=index, bus=Unknown(f"nvmlDeviceGetHandleByIndex: {error}"), failed=int(error.value))
    place = device.ask("nvmlDeviceGetPciInfo")
    parts: dict[str, Any] = {
        "bus": place if isinstance(place, Unknown) else bus_of(str(place.busId)),
        "uuid": device.ask("nvmlDeviceGetUUID"),
        "name": device.ask("nvmlDeviceGetName"),
        "recovery_action": device.field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        "ecc_on": _pair(device.ask("nvmlDeviceGetEccMode")),
        "ecc": _ecc(device),
        "rows": _rows(device),
        "pages": _pages(device),
        "heat": _heat(device),
        "power": _power(device),
        "clocks": _clocks(device),
        "utilization": _attribute(device.ask("nvmlDeviceGetUtilizationRates"), "gpu"),
        "memory_used": _attribute(device.ask("nvmlDeviceGetMemoryInfo"), "used"),
        "pcie": _pcie(device),
        "links": _links(device),
        "fabric": _fabric(device),
        "persistence": _switch(device.ask("nvmlDeviceGetPersistenceMode")),
        "processes": _processes(device, root),
    }
    return Gpu(index=index, failed=device.failed, **parts)


def _attribute(answer: Any, name: str) -> int | Unknown:  # noqa: ANN401
    return answer if isinstance(answer, Unknown) else int(getattr(answer, name))


def _switch(answer: Any) -> bool | Unknown:  # noqa: ANN401
    return answer if isinstance(answer, Unknown) else bool(answer)


def _pair(answer: Any) -> bool | Unknown:  # noqa: ANN401
    """Return what holds now of a mode that is told with what holds after the next reset."""
    return answer if isinstance(answer, Unknown) else bool(answer[0])


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
    banks = _attribute(device.ask("nvmlDeviceGetRowRemapperHistogram"), "none")
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
    """Ask with the newest form of the question, whose buffer the caller brings."""
    try:
        told = device.constant("c_nvmlGpuFabricInfoV_t")()
    except AttributeError:
        return Unknown("nvmlDeviceGetGpuFabricInfoV: this pynvml does not have it")
    answer = device.ask("nvmlDeviceGetGpuFabricInfoV", device.constant("byref")(told))
    return answer if isinstance(answer, Unknown) else Fabric(state=int(told.state), status=int(told.status))


def _processes(device: Device, root: Path) -> tuple[GpuProcess, ...] | Unknown:
    answer = device.ask("nvmlDeviceGetComputeRunningProcesses")
    if isinstance(answer, Unknown):
        return answer
    unknown = Unknown("the driver does not tell")
    return tuple(
        GpuProcess(
            pid=int(one.pid), memory=unknown if one.usedGpuMemory is None else int(one.usedGpuMemory), job=job_of(root, int(one.pid))
        )
        for one in answer
    )


def job_of(root: Path, pid: int) -> str | Unknown:
    """Return the job that a process got from its agent; empty for a process that got none."""
    found = files.text(root / "proc" / str(pid) / "environ")
    if isinstance(found, Unknown):
        return found
    mine = (entry.removeprefix(JOB) for entry in found.split("\0") if entry.startswith(JOB))
    return next(mine, "")
