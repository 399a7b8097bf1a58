"""What one look at a node finds: of its GPUs, kernel log, network, storage, host. A part that could not be read is `Unknown`.

Standard library only and free of other modules than `evidence`: a node without Holdfast gets this file with the program that fills it in.
Counters are as the node has them, ever growing; what grew between two looks is for the judges. Units stand in each field's docstring.
"""

from __future__ import annotations

from dataclasses import dataclass

from detectors.evidence import NOT_REQUESTED, Number, Unknown
from detectors.gpu_readings import GpuReading, XidEvent

Counters = dict[str, int]
"""Counter to value; what the node does not have is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """One record of the kernel's log."""

    sequence: int
    microseconds: int
    """Since the kernel started."""
    level: int
    """0 emergency to 7 debug."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReading:
    """The newest warnings and errors of the kernel's log, oldest first."""

    lines: tuple[KernelLine, ...]
    lost: int = 0
    """Records that were overwritten before they could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network interface with hardware behind it."""

    name: str
    wanted_up: bool | Unknown
    """The administrator has it switched on."""
    state: str | Unknown
    """The kernel's word: up, down, lowerlayerdown, dormant, unknown."""
    carrier: bool | Unknown
    speed: Number
    """Mbit/s; -1 is unknown."""
    counters: Counters | Unknown
    """The kernel's own counters."""
    driver_counters: Counters | Unknown
    """What its driver counts beside (`ethtool -S`)."""


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
    """One mounted file system that keeps files."""

    path: str
    kind: str
    """Its type, `ext4`, `nfs4`, `tmpfs`."""
    source: str
    options: tuple[str, ...]
    """As they were asked for; `ro` among them is somebody's wish."""
    own_options: tuple[str, ...]
    """Of the file system itself; `ro` or `emergency_ro` only here is the kernel's doing."""
    failed: int = 0
    """The error (errno) by which it said that nothing on it can be reached; 0 is fine."""
    size: Number = NOT_REQUESTED
    """Bytes."""
    free: Number = NOT_REQUESTED
    """Bytes that an ordinary user may still write."""
    inodes: Number = NOT_REQUESTED
    """0 where the file system does not count them."""
    inodes_free: Number = NOT_REQUESTED
    errors: Number = NOT_REQUESTED
    """Damage that the file system itself has met since it was last checked; only ext4 counts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One block device, as the kernel counts what it does."""

    name: str
    read_only: bool | Unknown
    counters: Counters | Unknown
    """`reads`, `read_ms`, `writes`, `write_ms`: requests, and milliseconds over all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageReading:
    """Mounts and disks of a node."""

    mounts: tuple[Mount, ...] | Unknown
    disks: tuple[Disk, ...] | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Share of time in which work stood still for want of a resource, in percent (PSI)."""

    some_60s: float
    full_60s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Processors, memory and life of a node."""

    boot: str | Unknown
    """The kernel's id of this boot: another one means that the node was started anew."""
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
    """How often cores or packages were slowed down for heat, in all."""
    clock_source: str | Unknown
    clock_sources: tuple[str, ...] | Unknown
    """All that the kernel would take."""
    files_open: Number
    files_most: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """What the kernel knows about its own clock (`adjtimex`)."""

    synchronized: bool
    """Somebody keeps it in step with the world."""
    offset: float
    """Seconds that are still to be made up for."""
    worst: float
    """Seconds by which it may be wrong at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """A service that a GPU node may need."""

    name: str
    present: bool
    """Its program is installed, or it is running."""
    running: bool | Unknown
    needed: bool
    """What the node is made of asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReading:
    """The services of a node."""

    services: tuple[ServiceState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A process that is not as it should be."""

    pid: int
    name: str
    state: str
    """`D`: waits without listening to signals; `Z`: ended, and its parent does not care."""
    age: float
    """Seconds since it was started."""
    wait: str | Unknown = NOT_REQUESTED
    """The kernel function in which it waits."""
    parent: int = 0
    switches: Number = NOT_REQUESTED
    """How often it gave its processor up so far: as long as that stays the same it has been waiting for one thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """Processes of a node that wait without listening to signals, or ended unnoticed."""

    count: int
    stuck: tuple[Stuck, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """One look at a node: every part is there, or says why not."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterGrowth:
    """Two looks at one node: what counters did between them can be told."""

    before: NodeReading
    now: NodeReading


Reading = NodeReading | CounterGrowth | XidEvent
"""Evidence about a node as a whole, beside that of jobs (`evidence.Evidence`)."""
