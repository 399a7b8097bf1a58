"""GPU part of a node reading; like `readings`, it is sent to nodes without Holdfast."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.detectors.evidence import NOT_REQUESTED, Number, Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Ecc:
    """Memory errors of a GPU: *volatile* since its driver was loaded, *aggregate* over its lifetime."""

    volatile_corrected: Number
    volatile_uncorrected: Number
    aggregate_corrected: Number
    aggregate_uncorrected: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class RemappedRows:
    """Memory rows that a GPU (Ampere and newer) has remapped to spare ones."""

    corrected: int
    """Because of corrected errors."""
    uncorrected: int
    """Because of uncorrected errors."""
    pending: bool
    """A row needs a reset to be remapped."""
    failed: bool
    """A row could not be remapped."""
    banks_without_spares: Number = NOT_REQUESTED


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredPages:
    """Memory pages that a GPU (before Ampere) no longer uses."""

    single_bit: int
    double_bit: int
    pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """Temperatures of a GPU and its limits, in degrees Celsius."""

    gpu: Number
    memory: Number
    slowdown_at: Number
    shutdown_at: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power of a GPU, in milliwatts."""

    draw: Number
    limit: Number
    """The current limit."""
    default_limit: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Clocks of a GPU in MHz, and the reasons for lower ones."""

    sm: Number
    sm_most: Number
    memory: Number
    reasons: Number
    """NVML's bit mask of clocks event reasons."""
    performance_state: Number
    """0 is the fastest, 15 the slowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pcie:
    """A GPU's link to its host."""

    generation: Number
    generation_most: Number
    """The maximum that GPU and host support."""
    width: Number
    """Lanes."""
    width_most: Number
    replays: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of a GPU."""

    link: int
    active: bool | Unknown
    replays: Number
    recoveries: Number
    crc_flit: Number
    crc_data: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A GPU's registration in an NVSwitch fabric, in NVML's terms."""

    state: int
    """0 unsupported, 1 not started, 2 in progress, 3 completed."""
    status: int
    """NVML's return code of the registration, once completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    memory: Number
    """Bytes."""
    job: str | Unknown = ""
    """The Holdfast job that it belongs to; empty for a foreign process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML sees it."""

    index: int
    bus: str | Unknown
    """Its PCI address as sysfs writes it, `0000:18:00.0`."""
    uuid: str | Unknown = NOT_REQUESTED
    name: str | Unknown = NOT_REQUESTED
    failed: int = 0
    """NVML's return code if the whole device is unusable; else 0."""
    recovery_action: Number = NOT_REQUESTED
    """The recovery action that the driver requests: NVML_GPU_RECOVERY_ACTION_*."""
    ecc_on: bool | Unknown = NOT_REQUESTED
    ecc: Ecc | Unknown = NOT_REQUESTED
    rows: RemappedRows | Unknown = NOT_REQUESTED
    pages: RetiredPages | Unknown = NOT_REQUESTED
    heat: Heat | Unknown = NOT_REQUESTED
    power: Power | Unknown = NOT_REQUESTED
    clocks: Clocks | Unknown = NOT_REQUESTED
    utilization: Number = NOT_REQUESTED
    """Percentage of recent time in which a kernel ran."""
    memory_used: Number = NOT_REQUESTED
    """Bytes."""
    pcie: Pcie | Unknown = NOT_REQUESTED
    links: tuple[NvLink, ...] | Unknown = NOT_REQUESTED
    fabric: Fabric | Unknown = NOT_REQUESTED
    persistence: bool | Unknown = NOT_REQUESTED
    processes: tuple[GpuProcess, ...] | Unknown = NOT_REQUESTED


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """All NVIDIA GPUs of a node."""

    on_bus: tuple[str, ...] | Unknown
    """PCI addresses of all NVIDIA GPUs that the kernel found."""
    module_version: str | Unknown = NOT_REQUESTED
    """Version of the loaded kernel module."""
    driver_version: str | Unknown = NOT_REQUESTED
    failed: int = 0
    """NVML's return code if it could not be initialized because of the node; else 0."""
    gpus: tuple[Gpu, ...] | Unknown = NOT_REQUESTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """An error that the NVIDIA driver reported."""

    code: int
    bus: str
    """PCI address of the GPU, `0000:18:00.0`."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """An Xid of a GPU of *node*, as an event."""

    node: str
    at: float
    xid: Xid
