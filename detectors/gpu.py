"""Kinds of faults of GPUs, their links and their driver, as NVML shows them; `gpu_judges` finds them."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from detectors.catalogue import Blame, RecommendedAction, fault_kind
from detectors.evidence import Sample, Unknown
from detectors.gpu_readings import Clocks, Ecc, Fabric, Gpu, GpuProcess, GpuReading, NvLink, Pcie, Power, RemappedRows, RetiredPages
from detectors.readings import CounterGrowth, NodeReading

NVML: Final = "https://docs.nvidia.com/deploy/nvml-api/"
_BUS: Final = "0000:18:00.0"
_DARK: Final = Unknown("sample")


def _reading(**facts: Any) -> NodeReading:  # noqa: ANN401 (fields of a Gpu)
    return NodeReading(node="n0", at=0.0, gpus=GpuReading(on_bus=(_BUS,), gpus=(Gpu(index=0, bus=_BUS, **facts),)))


def _node(**facts: Any) -> NodeReading:  # noqa: ANN401 (fields of a GpuReading)
    return NodeReading(node="n0", at=0.0, gpus=GpuReading(**{"on_bus": (_BUS,), **facts}))


def _after(before: NodeReading, now: NodeReading) -> CounterGrowth:
    return CounterGrowth(before=before, now=NodeReading(node=now.node, at=before.at + 60.0, gpus=now.gpus))


def _seen(**facts: Any) -> Sample:  # noqa: ANN401
    return Sample(_reading(**facts))


def _clocks(reasons: int) -> Clocks:
    return Clocks(sm=1200, sm_most=1980, memory=2619, reasons=reasons, performance_state=0)


def _ecc(volatile: int, aggregate: int) -> Ecc:
    return Ecc(volatile_corrected=3, volatile_uncorrected=volatile, aggregate_corrected=9, aggregate_uncorrected=aggregate)


def _rows(*, pending: bool = False, failed: bool = False) -> RemappedRows:
    return RemappedRows(corrected=0, uncorrected=1, pending=pending, failed=failed)


def _pages(count: int) -> RetiredPages:
    return RetiredPages(single_bit=count, double_bit=0, pending=False)


def _pcie(width: int, replays: int = 0) -> Pcie:
    return Pcie(generation=5, generation_most=5, width=width, width_most=16, replays=replays)


def _links(*, second: bool = True, replays: int = 0) -> tuple[NvLink, ...]:
    return tuple(
        NvLink(link=number, active=active, replays=replays, recoveries=0, crc_flit=0, crc_data=0)
        for number, active in enumerate((True, second))
    )


def _power(limit: int) -> Power:
    return Power(draw=300_000, limit=limit, default_limit=700_000)


_define = partial(fault_kind, component="gpu", source="NVML", blame=Blame.GPU, reference=NVML, weight=60)

OFF_BUS: Final = _define(
    id="gpu-off-bus",
    title="A GPU no longer answers on its bus",
    recommended_action=RecommendedAction.EVICT,
    action="replace the node; a reboot or a power cycle may bring the GPU back, and it has to prove itself before it is used",
    reference="https://docs.nvidia.com/deploy/xid-errors/",
    unhealthy=_seen(failed=15),
    healthy=_seen(failed=0),
    weight=98,
)
RESET_REQUIRED: Final = _define(
    id="gpu-reset-required",
    title="The driver asks for a reset of a GPU or its node",
    recommended_action=RecommendedAction.RESET_GPU,
    action="move the ranks off, reset the GPU (or reboot, as it asks) and test it before it is used",
    unhealthy=_seen(recovery_action=1),
    healthy=_seen(recovery_action=0),
    weight=92,
)
UNUSABLE: Final = _define(
    id="gpu-unusable",
    title="NVML cannot be started or a GPU not be opened, for a reason of the node's own",
    recommended_action=RecommendedAction.EVICT,
    action="replace the node and look at the kernel's log; a reboot often helps",
    unhealthy=Sample(_node(failed=999, gpus=Unknown("nvmlInit: Unknown Error"))),
    healthy=Sample(_node(gpus=Unknown("nvmlInit: NVML Shared Library Not Found"))),
    weight=91,
)
DRIVER_MISSING: Final = _define(
    id="driver-not-loaded",
    title="A node has GPUs, and the NVIDIA driver is not loaded",
    recommended_action=RecommendedAction.EVICT,
    blame=Blame.NODE,
    action="load the driver (`modprobe nvidia`) or reboot; see why it was not loaded",
    unhealthy=Sample(_node(failed=9, gpus=Unknown("nvmlInit: Driver Not Loaded"))),
    healthy=Sample(_node(failed=9, on_bus=(), gpus=Unknown("nvmlInit: Driver Not Loaded"))),
    weight=91,
)
DRIVER_MISMATCH: Final = _define(
    id="driver-mismatch",
    title="The NVIDIA library and the loaded kernel module are of different versions",
    recommended_action=RecommendedAction.EVICT,
    blame=Blame.NODE,
    action="reboot, or unload and load the module: an update was installed beside a running driver",
    unhealthy=Sample(_node(failed=18, gpus=Unknown("nvmlInit: Driver/library version mismatch"))),
    healthy=Sample(_node(module_version="550.54.15", driver_version="550.54.15", gpus=())),
    weight=91,
)
ECC: Final = _define(
    id="gpu-ecc-uncorrectable",
    title="A GPU's memory lost data that its error correction could not restore",
    recommended_action=RecommendedAction.RESET_GPU,
    action="restart the ranks on another GPU, reset this one, and replace it when it comes again",
    reference="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
    unhealthy=_seen(ecc=_ecc(volatile=1, aggregate=1)),
    healthy=_seen(ecc=_ecc(volatile=0, aggregate=4)),
    weight=90,
)
REMAP_PENDING: Final = _define(
    id="gpu-row-remap-pending",
    title="A GPU has broken memory that is replaced at its next reset",
    recommended_action=RecommendedAction.DRAIN,
    action="reset the GPU at the next pause",
    reference="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
    unhealthy=_seen(rows=_rows(pending=True)),
    healthy=_seen(rows=_rows()),
)
REMAP_FAILED: Final = _define(
    id="gpu-row-remap-failed",
    title="A GPU has broken memory and nothing left to replace it",
    recommended_action=RecommendedAction.EVICT,
    action="take the GPU out of service and have it replaced: this is a condition of its warranty",
    reference="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
    unhealthy=_seen(rows=_rows(failed=True)),
    healthy=_seen(rows=_rows()),
    weight=89,
)
PAGES: Final = _define(
    id="gpu-pages-retired",
    title="A GPU has retired as many memory pages as it can, or waits for a reset to retire more",
    recommended_action=RecommendedAction.DRAIN,
    action="reset the GPU if pages are pending; have it replaced if its list is full",
    reference="https://docs.nvidia.com/deploy/dynamic-page-retirement/",
    unhealthy=_seen(pages=_pages(63)),
    healthy=_seen(pages=_pages(5)),
)
THROTTLE: Final = _define(
    id="gpu-thermal-throttle",
    title="A GPU slows itself down for heat",
    recommended_action=RecommendedAction.MONITOR,
    action="check cooling and the air around; its ranks hold all others up",
    unhealthy=_seen(clocks=_clocks(0x40)),
    healthy=_seen(clocks=_clocks(0x04)),
)
POWER_BRAKE: Final = _define(
    id="gpu-power-brake",
    title="A GPU is slowed down from outside for want of power",
    recommended_action=RecommendedAction.MONITOR,
    blame=Blame.NODE,
    action="check power supplies and the rack's power",
    unhealthy=_seen(clocks=_clocks(0x88)),
    healthy=_seen(clocks=_clocks(0x04)),
)
SLOWDOWN: Final = _define(
    id="gpu-slowdown",
    title="A GPU's hardware holds its clocks down and does not say for what",
    recommended_action=RecommendedAction.MONITOR,
    action="check cables, power and temperature; replace the node if it lasts",
    unhealthy=_seen(clocks=_clocks(0x08)),
    healthy=_seen(clocks=_clocks(0x10)),
)
POWER_CAPPED: Final = _define(
    id="gpu-power-capped",
    title="A GPU may draw less power than its board was made for",
    recommended_action=RecommendedAction.MONITOR,
    blame=Blame.NODE,
    action="restore the limit (`nvidia-smi -pl`), unless somebody set it on purpose on all nodes",
    unhealthy=_seen(power=_power(450_000)),
    healthy=_seen(power=_power(700_000)),
)
NVLINK_DOWN: Final = _define(
    id="nvlink-down",
    title="An NVLink of a GPU in an NVSwitch fabric is down, or one that was up",
    recommended_action=RecommendedAction.EVICT,
    action="replace the node; restart the fabric manager, reset all GPUs of the node",
    unhealthy=_seen(links=_links(second=False), fabric=Fabric(state=3, status=0)),
    healthy=_seen(links=_links(second=False), fabric=Fabric(state=0, status=0)),  # a card with fewer bridges than sockets for them
    weight=88,
)
NVLINK_ERRORS: Final = _define(
    id="nvlink-errors",
    title="An NVLink had to send again or to recover",
    recommended_action=RecommendedAction.MONITOR,
    action="watch; replace the node when it goes on",
    unhealthy=Sample(_after(_reading(links=_links(replays=3)), _reading(links=_links(replays=4)))),
    healthy=Sample(_after(_reading(links=_links(replays=3)), _reading(links=_links(replays=3)))),
)
PCIE: Final = _define(
    id="pcie-degraded",
    title="A GPU's PCIe link runs with fewer lanes or slower than GPU and host can",
    recommended_action=RecommendedAction.MONITOR,
    action="reseat the card or its cable; replace the node when it stays",
    unhealthy=_seen(pcie=_pcie(width=8)),
    healthy=_seen(pcie=_pcie(width=16)),
)
REPLAYS: Final = _define(
    id="pcie-replays",
    title="A GPU's PCIe link sends packets again and again",
    recommended_action=RecommendedAction.MONITOR,
    action="watch; reseat the card or its cable when it goes on",
    unhealthy=Sample(_after(_reading(pcie=_pcie(16, replays=100)), _reading(pcie=_pcie(16, replays=120)))),
    healthy=Sample(_after(_reading(pcie=_pcie(16, replays=100)), _reading(pcie=_pcie(16, replays=102)))),
)
FABRIC: Final = _define(
    id="fabric-not-ready",
    title="A GPU has not joined the NVSwitch fabric of its node",
    recommended_action=RecommendedAction.EVICT,
    blame=Blame.NODE,
    action="start the fabric manager; reset the GPUs or reboot when that does not help",
    reference="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
    unhealthy=_seen(fabric=Fabric(state=2, status=0)),
    healthy=_seen(fabric=Fabric(state=3, status=0)),
    weight=90,
)
STRANGER: Final = _define(
    id="gpu-stranger",
    title="A process that belongs to no job computes on a GPU of a job",
    recommended_action=RecommendedAction.MONITOR,
    blame=Blame.PROCESS,
    action="find its owner and end it: it takes memory and time from the job",
    unhealthy=_seen(processes=(GpuProcess(pid=10, memory=1 << 30, job="gpt"), GpuProcess(pid=11, memory=1 << 30))),
    healthy=_seen(processes=(GpuProcess(pid=10, memory=1 << 30, job="gpt"), GpuProcess(pid=11, memory=1 << 30, job=_DARK))),
)
