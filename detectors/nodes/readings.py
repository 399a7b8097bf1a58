"""Readings of one node: GPUs, kernel log, network, storage, host, Kubernetes, DCGM. A part that could not be read is `Unknown`.

Imports only the standard library, `evidence` and `gpu_readings`: nodes without Holdfast get this file with the program that reads them.
Counters are the raw, ever growing values; the checks compare two readings. Units are in each field's docstring.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.detectors.evidence import NOT_REQUESTED, Number, Unknown
from holdfast.detectors.nodes.gpu_readings import GpuReading, XidEvent

Counters = dict[str, int]
"""Counter name to value, only those that the node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """One record of the kernel log."""

    sequence: int
    microseconds: int
    """Time since the kernel started."""
    level: int
    """0 emergency to 7 debug."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReading:
    """The newest warnings and errors of the kernel log, oldest first."""

    lines: tuple[KernelLine, ...]
    lost: int = 0
    """Records that were overwritten before they could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One physical network interface."""

    name: str
    wanted_up: bool | Unknown
    """Enabled by the administrator."""
    state: str | Unknown
    """The kernel's state: up, down, lowerlayerdown, dormant, unknown."""
    carrier: bool | Unknown
    speed: Number
    """Mbit/s; -1 is unknown."""
    counters: Counters | Unknown
    """Generic counters of the kernel."""
    driver_counters: Counters | Unknown
    """Additional counters of its driver (`ethtool -S`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IbPort:
    """One port of an InfiniBand or RoCE adapter."""

    device: str
    port: int
    state: str | Unknown
    """`ACTIVE`, `INIT`, `DOWN`, ..."""
    physical_state: str | Unknown
    """`LinkUp`, `Polling`, `Disabled`, ..."""
    layer: str | Unknown
    """`InfiniBand` or `Ethernet`."""
    rate: float | Unknown
    """Gbit/s."""
    counters: Counters | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkReading:
    """All network interfaces and InfiniBand ports of a node."""

    nics: tuple[Nic, ...] | Unknown
    ib_ports: tuple[IbPort, ...] | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mounted file system."""

    path: str
    kind: str
    """File system type: `ext4`, `nfs4`, `tmpfs`."""
    source: str
    options: tuple[str, ...]
    """Options of the mount; `ro` here was requested."""
    own_options: tuple[str, ...]
    """Options of the file system; `ro` or `emergency_ro` only here was set by the kernel."""
    failed: int = 0
    """The errno if the file system is inaccessible; else 0."""
    size: Number = NOT_REQUESTED
    """Bytes."""
    free: Number = NOT_REQUESTED
    """Bytes available to unprivileged users."""
    inodes: Number = NOT_REQUESTED
    """0 if the file system does not count them."""
    inodes_free: Number = NOT_REQUESTED
    errors: Number = NOT_REQUESTED
    """Errors that the file system found since its last check; only ext4 counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One block device."""

    name: str
    read_only: bool | Unknown
    counters: Counters | Unknown
    """`reads`, `read_ms`, `writes`, `write_ms`: requests, and their total milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageReading:
    """Mounts and disks of a node."""

    mounts: tuple[Mount, ...] | Unknown
    disks: tuple[Disk, ...] | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Percentage of time in which tasks stalled for lack of a resource (PSI)."""

    some_60s: float
    full_60s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Processors, memory and uptime of a node."""

    boot: str | Unknown
    """The kernel's boot id, which changes at each reboot."""
    uptime: float | Unknown
    """Seconds."""
    processors: Number
    load_5m: float | Unknown
    memory_total: Number
    """Bytes."""
    memory_available: Number
    """Bytes."""
    memory_pressure: Pressure | Unknown
    oom_kills: Number
    memory_errors_corrected: Number
    """Of all memory controllers (EDAC)."""
    memory_errors_uncorrected: Number
    throttled: Number
    """Total thermal throttling events of cores and packages."""
    clock_source: str | Unknown
    clock_sources: tuple[str, ...] | Unknown
    """Clock sources available to the kernel."""
    files_open: Number
    files_most: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """State of the kernel's clock (`adjtimex`)."""

    synchronized: bool
    """Synchronized by a time service."""
    offset: float
    """Remaining correction in seconds."""
    worst: float
    """Maximum error in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """A service that a GPU node may need."""

    name: str
    present: bool
    """Installed or running."""
    running: bool | Unknown
    needed: bool
    """Required by the node's hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReading:
    """The services of a node."""

    services: tuple[ServiceState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckProcess:
    """A blocked or zombie process."""

    pid: int
    name: str
    state: str
    """`D`: uninterruptible sleep; `Z`: zombie."""
    age: float
    """Seconds since it was started."""
    wait: str | Unknown = NOT_REQUESTED
    """The kernel function in which it waits."""
    parent: int = 0
    switches: Number = NOT_REQUESTED
    """Number of context switches so far: unchanged as long as it is in one wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """Processes of a node in uninterruptible sleep, and zombies."""

    count: int
    stuck: tuple[StuckProcess, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """One condition of a Kubernetes node: what the kubelet or a monitor of the node reports to the API server."""

    type: str
    status: str
    """`True`, `False` or `Unknown`; which one is bad depends on the type."""
    reason: str = ""
    message: str = ""
    since: float | None = None
    """When its status changed last (seconds since 1970, by the reporter's clock); none where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """One event of a Kubernetes node: what a monitor reports of a problem that does not last."""

    type: str
    """`Warning`; NVSentinel writes the name of its check here."""
    reason: str
    source: str
    """Who reports it: `kernel-monitor`, `syslog-health-monitor`, `kubelet`."""
    message: str = ""
    count: int = 1
    """How often it was reported so far."""
    last: float | None = None
    """When it was reported last (seconds since 1970, by the reporter's clock); none where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesReading:
    """What the API server of a Kubernetes cluster has of this node."""

    conditions: tuple[NodeCondition, ...]
    unschedulable: bool = False
    """It is cordoned."""
    taints: tuple[str, ...] = ()
    """Each as `key=value:effect`."""
    labels: dict[str, str]
    """Those that a repair service sets."""
    events: tuple[NodeEvent, ...] | Unknown = NOT_REQUESTED
    """Those of the last hour that are not normal, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmIncident:
    """What DCGM's health check says of one system of one GPU or NVSwitch."""

    entity: str
    """Kind and DCGM's own number of the device: `GPU 3`."""
    system: str
    """`Memory system`, `NVLINK system`, `PCIe system`, ..."""
    health: str
    """`Warning` or `Failure`, the worst of its messages."""
    message: str
    """All messages of the system, with what DCGM recommends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmReading:
    """What DCGM's host engine says of the health of all GPUs of a node."""

    overall: str
    """`Healthy`, `Warning` or `Failure`."""
    incidents: tuple[DcgmIncident, ...] = ()
    gpus: dict[str, str]
    """PCI address (as `Gpu.bus`) by DCGM's number of a GPU, of those that the node's bus has; read only where there are incidents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """One reading of a node; missing parts have a reason."""

    node: str
    at: float
    """Seconds since 1970 on the node's own clock."""
    gpus: GpuReading | Unknown = NOT_REQUESTED
    kernel: KernelReading | Unknown = NOT_REQUESTED
    network: NetworkReading | Unknown = NOT_REQUESTED
    storage: StorageReading | Unknown = NOT_REQUESTED
    host: HostReading | Unknown = NOT_REQUESTED
    clock: ClockReading | Unknown = NOT_REQUESTED
    services: ServiceReading | Unknown = NOT_REQUESTED
    processes: ProcessReading | Unknown = NOT_REQUESTED
    kubernetes: KubernetesReading | Unknown = NOT_REQUESTED
    """Not requested where this node has no credentials of a Kubernetes cluster."""
    dcgm: DcgmReading | Unknown = NOT_REQUESTED
    """Not requested where no host engine runs, or `dcgmi` is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterGrowth:
    """Two readings of one node, to compare counters."""

    before: NodeReading
    now: NodeReading


Reading = NodeReading | CounterGrowth | XidEvent
"""Evidence about a node, in addition to that of jobs (`evidence.Evidence`)."""
