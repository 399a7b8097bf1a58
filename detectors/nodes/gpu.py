"""Faults of GPUs, their links and their driver, from NVML readings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from holdfast.detectors.catalogue import Attribution, RecommendedAction, fault_kind
from holdfast.detectors.evidence import Sample, Unknown
from holdfast.detectors.nodes.findings import MINUTE, SECOND, FaultFinding, ReadingPair, Thresholds, above, grown
from holdfast.detectors.nodes.gpu_readings import (
    Clocks,
    Ecc,
    Fabric,
    Gpu,
    GpuProcess,
    GpuReading,
    NvLink,
    Pcie,
    Power,
    RemappedRows,
    RetiredPages,
)
from holdfast.detectors.nodes.readings import CounterGrowth, NodeReading
from holdfast.plurals import plural

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


def _busy(draw: int) -> NodeReading:
    return _reading(utilization=100, power=Power(draw=draw, limit=700_000, default_limit=700_000))


_define = partial(fault_kind, component="gpu", source="NVML", attributed_to=Attribution.GPU, reference=NVML, weight=60)

OFF_BUS: Final = _define(
    id="gpu-off-bus",
    title="A GPU no longer answers on its bus",
    recommended_action=RecommendedAction.EVICT,
    action="replace the node; a reboot or a power cycle may bring the GPU back; test it before it is used",
    reference="https://docs.nvidia.com/deploy/xid-errors/",
    unhealthy=_seen(failed=15),
    healthy=_seen(failed=0),
    weight=98,
)
RESET_REQUIRED: Final = _define(
    id="gpu-reset-required",
    title="The driver requests a reset of a GPU or its node",
    recommended_action=RecommendedAction.RESET_GPU,
    action="move the ranks away, reset the GPU (or reboot, as requested) and test it before it is used",
    unhealthy=_seen(recovery_action=1),
    healthy=_seen(recovery_action=0),
    weight=92,
)
UNUSABLE: Final = _define(
    id="gpu-unusable",
    title="NVML cannot be initialized or a GPU cannot be opened, because of the node",
    recommended_action=RecommendedAction.EVICT,
    action="replace the node and check the kernel log; a reboot often helps",
    unhealthy=Sample(_node(failed=999, gpus=Unknown("nvmlInit: Unknown Error"))),
    healthy=Sample(_node(gpus=Unknown("nvmlInit: NVML Shared Library Not Found"))),
    weight=91,
)
DRIVER_MISSING: Final = _define(
    id="driver-not-loaded",
    title="A node has GPUs, and the NVIDIA driver is not loaded",
    recommended_action=RecommendedAction.EVICT,
    attributed_to=Attribution.NODE,
    action="load the driver (`modprobe nvidia`) or reboot; find out why it was not loaded",
    unhealthy=Sample(_node(failed=9, gpus=Unknown("nvmlInit: Driver Not Loaded"))),
    healthy=Sample(_node(failed=9, on_bus=(), gpus=Unknown("nvmlInit: Driver Not Loaded"))),
    weight=91,
)
DRIVER_MISMATCH: Final = _define(
    id="driver-mismatch",
    title="The NVIDIA library and the loaded kernel module have different versions",
    recommended_action=RecommendedAction.EVICT,
    attributed_to=Attribution.NODE,
    action="reboot, or reload the module: an update was installed while the driver was loaded",
    unhealthy=Sample(_node(failed=18, gpus=Unknown("nvmlInit: Driver/library version mismatch"))),
    healthy=Sample(_node(module_version="550.54.15", driver_version="550.54.15", gpus=())),
    weight=91,
)
ECC: Final = _define(
    id="gpu-ecc-uncorrectable",
    title="A GPU has uncorrectable memory errors",
    recommended_action=RecommendedAction.RESET_GPU,
    action="restart the ranks on another GPU, reset this one, and replace it if it happens again",
    reference="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
    unhealthy=_seen(ecc=_ecc(volatile=1, aggregate=1)),
    healthy=_seen(ecc=_ecc(volatile=0, aggregate=4)),
    weight=90,
)
REMAP_PENDING: Final = _define(
    id="gpu-row-remap-pending",
    title="A GPU has a memory row to remap at its next reset",
    recommended_action=RecommendedAction.DRAIN,
    action="reset the GPU at the next pause",
    reference="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
    unhealthy=_seen(rows=_rows(pending=True)),
    healthy=_seen(rows=_rows()),
)
REMAP_FAILED: Final = _define(
    id="gpu-row-remap-failed",
    title="A GPU could not remap a broken memory row",
    recommended_action=RecommendedAction.EVICT,
    action="take the GPU out of service and have it replaced under warranty",
    reference="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
    unhealthy=_seen(rows=_rows(failed=True)),
    healthy=_seen(rows=_rows()),
    weight=89,
)
PAGES: Final = _define(
    id="gpu-pages-retired",
    title="A GPU has retired too many memory pages, or needs a reset to retire more",
    recommended_action=RecommendedAction.DRAIN,
    action="reset the GPU if pages are pending; have it replaced if its list is full",
    reference="https://docs.nvidia.com/deploy/dynamic-page-retirement/",
    unhealthy=_seen(pages=_pages(63)),
    healthy=_seen(pages=_pages(5)),
)
THROTTLE: Final = _define(
    id="gpu-thermal-throttle",
    title="A GPU throttles because of heat",
    recommended_action=RecommendedAction.MONITOR,
    action="check cooling and room temperature; its ranks slow down all others",
    unhealthy=_seen(clocks=_clocks(0x40)),
    healthy=_seen(clocks=_clocks(0x04)),
)
POWER_BRAKE: Final = _define(
    id="gpu-power-brake",
    title="A GPU is slowed down by an external power brake",
    recommended_action=RecommendedAction.MONITOR,
    attributed_to=Attribution.NODE,
    action="check power supplies and the rack's power",
    unhealthy=_seen(clocks=_clocks(0x88)),
    healthy=_seen(clocks=_clocks(0x04)),
)
SLOWDOWN: Final = _define(
    id="gpu-slowdown",
    title="A GPU's hardware slows its clocks down without a stated reason",
    recommended_action=RecommendedAction.MONITOR,
    action="check cables, power and temperature; replace the node if it lasts",
    unhealthy=_seen(clocks=_clocks(0x08)),
    healthy=_seen(clocks=_clocks(0x10)),
)
SPINNING: Final = _define(
    id="gpu-spinning",
    title="A GPU is always busy and draws little power: its kernel waits, as a collective does for the GPUs of other ranks",
    recommended_action=RecommendedAction.RECORD,
    attributed_to=Attribution.PROCESS,
    action="look for the GPU of the job that is not busy, or draws its usual power: the others wait for it",
    unhealthy=Sample(_after(_busy(150_000), _busy(152_000))),
    healthy=Sample(_after(_busy(610_000), _busy(152_000))),
    weight=20,
    confused_with=("job-hang",),
)
POWER_CAPPED: Final = _define(
    id="gpu-power-capped",
    title="A GPU's power limit is below its default",
    recommended_action=RecommendedAction.MONITOR,
    attributed_to=Attribution.NODE,
    action="restore the limit (`nvidia-smi -pl`), unless it was set on purpose on all nodes",
    unhealthy=_seen(power=_power(450_000)),
    healthy=_seen(power=_power(700_000)),
)
NVLINK_DOWN: Final = _define(
    id="nvlink-down",
    title="An NVLink of a GPU in an NVSwitch fabric is down, or went down",
    recommended_action=RecommendedAction.EVICT,
    action="replace the node; restart the fabric manager, reset all GPUs of the node",
    unhealthy=_seen(links=_links(second=False), fabric=Fabric(state=3, status=0)),
    healthy=_seen(links=_links(second=False), fabric=Fabric(state=0, status=0)),  # a card with fewer bridges than sockets for them
    weight=88,
)
NVLINK_ERRORS: Final = _define(
    id="nvlink-errors",
    title="An NVLink had replays or recoveries",
    recommended_action=RecommendedAction.MONITOR,
    action="monitor; replace the node if it continues",
    unhealthy=Sample(_after(_reading(links=_links(replays=3)), _reading(links=_links(replays=4)))),
    healthy=Sample(_after(_reading(links=_links(replays=3)), _reading(links=_links(replays=3)))),
)
PCIE: Final = _define(
    id="pcie-degraded",
    title="A GPU's PCIe link has fewer lanes or a lower speed than GPU and host support",
    recommended_action=RecommendedAction.MONITOR,
    action="reseat the card or its cable; replace the node if it stays",
    unhealthy=_seen(pcie=_pcie(width=8)),
    healthy=_seen(pcie=_pcie(width=16)),
)
REPLAYS: Final = _define(
    id="pcie-replays",
    title="A GPU's PCIe link has many replays",
    recommended_action=RecommendedAction.MONITOR,
    action="monitor; reseat the card or its cable if it continues",
    unhealthy=Sample(_after(_reading(pcie=_pcie(16, replays=100)), _reading(pcie=_pcie(16, replays=120)))),
    healthy=Sample(_after(_reading(pcie=_pcie(16, replays=100)), _reading(pcie=_pcie(16, replays=102)))),
)
FABRIC: Final = _define(
    id="fabric-not-ready",
    title="A GPU has not joined the NVSwitch fabric of its node",
    recommended_action=RecommendedAction.EVICT,
    attributed_to=Attribution.NODE,
    action="start the fabric manager; reset the GPUs or reboot if that does not help",
    reference="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
    unhealthy=_seen(fabric=Fabric(state=2, status=0)),
    healthy=_seen(fabric=Fabric(state=3, status=0)),
    weight=90,
)
STRANGER: Final = _define(
    id="gpu-foreign-process",
    title="A foreign process computes on a GPU of a job",
    recommended_action=RecommendedAction.MONITOR,
    attributed_to=Attribution.PROCESS,
    action="find its owner and end it: it takes memory and compute time from the job",
    unhealthy=_seen(processes=(GpuProcess(pid=10, memory=1 << 30, job="gpt"), GpuProcess(pid=11, memory=1 << 30))),
    healthy=_seen(processes=(GpuProcess(pid=10, memory=1 << 30, job="gpt"), GpuProcess(pid=11, memory=1 << 30, job=_DARK))),
)

NVML_LIB_MISMATCH: Final = 18
NVML_NOT_LOADED: Final = 9
NVML_GPU_LOST: Final = 15
NVML_RESET_REQUIRED: Final = 16
"""Return codes."""
STARTING: Final = {1: "not started", 2: "in progress"}
COMPLETED: Final = 3
"""States of a fabric's registration."""
HW_SLOWDOWN: Final = 0x08
THERMAL: Final = {0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown"}
BRAKE: Final = 0x80
"""Bits of NVML's clocks event reasons."""
ASKED_FOR: Final = {
    1: "for a reset of the GPU",
    2: "for a reboot of the node",
    3: "to drain peer-to-peer traffic",
    4: "to drain and reset the GPU",
    5: "to recover its IMEX domain",
    6: "for a reset of its bus",
    7: "for a reboot of the system",
}
"""NVML_GPU_RECOVERY_ACTION_*."""


def judge_gpus(pair: ReadingPair[GpuReading]) -> Iterator[FaultFinding]:
    """Yield faults of a node's driver and GPUs."""
    yield from _check_driver(pair.now)
    before = {} if pair.before is None or isinstance(pair.before.gpus, Unknown) else {_name(gpu): gpu for gpu in pair.before.gpus}
    if isinstance(pair.now.gpus, Unknown):
        return
    for gpu in pair.now.gpus:
        for judge in _CHECKS:
            yield from judge(ReadingPair(now=gpu, before=before.get(_name(gpu)), seconds=pair.seconds, limits=pair.limits))
    if not any(isinstance(gpu.bus, Unknown) for gpu in pair.now.gpus):  # one without an address may be any of those before
        for name in sorted(set(before) - {_name(gpu) for gpu in pair.now.gpus}):
            yield FaultFinding(kind=OFF_BUS.id, part=name, quote=f"{name} is no longer among the GPUs of the node")


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}" if isinstance(gpu.bus, Unknown) else f"GPU {gpu.bus}"


def _check_driver(now: GpuReading) -> Iterator[FaultFinding]:
    why = now.gpus.why if isinstance(now.gpus, Unknown) else ""
    versions = now.module_version, now.driver_version
    if now.failed == NVML_LIB_MISMATCH:
        yield FaultFinding(kind=DRIVER_MISMATCH.id, part="driver", quote=f"{why}; the loaded module is {now.module_version}")
    elif now.failed == NVML_NOT_LOADED:
        if now.on_bus and not isinstance(now.on_bus, Unknown):
            yield FaultFinding(kind=DRIVER_MISSING.id, part="driver", quote=f"{why}; the bus has {', '.join(now.on_bus)}")
    elif now.failed:
        yield FaultFinding(kind=UNUSABLE.id, part="driver", quote=why)
    elif not any(isinstance(version, Unknown) for version in versions) and versions[0] != versions[1]:
        yield FaultFinding(kind=DRIVER_MISMATCH.id, part="driver", quote=f"the loaded module is {versions[0]}, NVML says {versions[1]}")


def _check_whole(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    """Check whether a GPU is usable."""
    gpu, name = pair.now, _name(pair.now)
    if gpu.failed == NVML_GPU_LOST:
        yield FaultFinding(kind=OFF_BUS.id, part=name, quote=f"{name}: NVML says that it is lost")
    elif gpu.failed == NVML_RESET_REQUIRED:
        yield FaultFinding(kind=RESET_REQUIRED.id, part=name, quote=f"{name}: NVML says that it needs a reset")
    elif gpu.failed:
        why = gpu.bus.why if isinstance(gpu.bus, Unknown) else f"NVML error {gpu.failed}"
        yield FaultFinding(kind=UNUSABLE.id, part=name, quote=f"{name}: {why}")
    elif not isinstance(gpu.recovery_action, Unknown) and gpu.recovery_action:
        wish = ASKED_FOR.get(gpu.recovery_action, f"for action {gpu.recovery_action}")
        yield FaultFinding(kind=RESET_REQUIRED.id, part=name, quote=f"{name}: the driver asks {wish}")


def _check_ecc(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    """Check errors since the driver was loaded, or since the previous reading."""
    ecc, name = pair.now.ecc, _name(pair.now)
    if isinstance(ecc, Unknown):
        return
    known = pair.before is not None and not isinstance(pair.before.ecc, Unknown) and pair.before.ecc.volatile_uncorrected
    old = known if isinstance(known, int) else 0
    if more := grown(old, ecc.volatile_uncorrected):
        lifelong = "" if isinstance(ecc.aggregate_uncorrected, Unknown) else f", {ecc.aggregate_uncorrected} in its life"
        yield FaultFinding(kind=ECC.id, part=name, quote=f"{name}: {plural(more, 'uncorrectable memory error')}{lifelong}")


def _check_rows(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    rows, name = pair.now.rows, _name(pair.now)
    if isinstance(rows, Unknown):
        return
    if rows.failed:
        yield FaultFinding(kind=REMAP_FAILED.id, part=name, quote=f"{name}: a memory row could not be replaced")
    elif rows.pending:
        yield FaultFinding(kind=REMAP_PENDING.id, part=name, quote=f"{name}: a memory row waits for a reset to be replaced")


def _check_pages(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    pages, name = pair.now.pages, _name(pair.now)
    if isinstance(pages, Unknown):
        return
    count, most = pages.single_bit + pages.double_bit, pair.limits.retired_pages
    if pages.pending or count >= most:
        pending = ", more are pending" if pages.pending else ""
        yield FaultFinding(kind=PAGES.id, part=name, quote=f"{name}: {count} retired pages, and {most} are the limit{pending}")


def _check_clocks(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    """Check temperature and the reasons for reduced clocks."""
    gpu, name = pair.now, _name(pair.now)
    reasons = 0 if isinstance(gpu.clocks, Unknown) or isinstance(gpu.clocks.reasons, Unknown) else gpu.clocks.reasons
    hot = [words for bit, words in THERMAL.items() if reasons & bit]
    if not isinstance(gpu.heat, Unknown) and _reached(gpu.heat.gpu, gpu.heat.slowdown_at):
        hot.append(f"{gpu.heat.gpu} °C, and it slows down at {gpu.heat.slowdown_at} °C")
    if hot:
        yield FaultFinding(kind=THROTTLE.id, part=name, quote=f"{name}: {', '.join(hot)}")
    if reasons & BRAKE:
        yield FaultFinding(kind=POWER_BRAKE.id, part=name, quote=f"{name}: hardware power brake slowdown")
    elif reasons & HW_SLOWDOWN and not hot:
        yield FaultFinding(kind=SLOWDOWN.id, part=name, quote=f"{name}: hardware slowdown")


def _reached(value: int | Unknown, limit: int | Unknown) -> bool:
    """Return whether *value* reaches *limit*; drivers that no longer report a limit may return 0."""
    return not isinstance(value, Unknown) and not isinstance(limit, Unknown) and 0 < limit <= value


def _check_power(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    power, name = pair.now.power, _name(pair.now)
    if isinstance(power, Unknown) or isinstance(power.limit, Unknown) or isinstance(power.default_limit, Unknown):
        return
    if power.limit < power.default_limit:
        quote = f"{name}: at most {power.limit / 1000:g} W, made for {power.default_limit / 1000:g} W"
        yield FaultFinding(kind=POWER_CAPPED.id, part=name, quote=quote)


def _check_spinning(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    """Check two readings: a kernel that is limited by memory or by the host may draw little power for a moment."""
    both = [one for one in (pair.before, pair.now) if one is not None and _spins(one, pair.limits)]
    power, name = pair.now.power, _name(pair.now)
    if len(both) > 1 and not isinstance(power, Unknown):
        draw, limit = (0 if isinstance(one, Unknown) else one / 1000 for one in (power.draw, power.limit))
        quote = f"{name}: a kernel runs {pair.now.utilization} % of the time, at {draw:g} of {limit:g} W"
        yield FaultFinding(kind=SPINNING.id, part=name, quote=quote)


def _spins(gpu: Gpu, limits: Thresholds) -> bool:
    power, busy = gpu.power, gpu.utilization
    if isinstance(power, Unknown) or isinstance(busy, Unknown) or isinstance(power.draw, Unknown) or isinstance(power.limit, Unknown):
        return False
    return busy >= limits.spinning_utilization and power.draw <= limits.spinning_power * power.limit


def _check_fabric(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    fabric, name = pair.now.fabric, _name(pair.now)
    if isinstance(fabric, Unknown):
        return
    trouble = STARTING.get(fabric.state) or (
        f"ended with NVML error {fabric.status}" if fabric.state == COMPLETED and fabric.status else ""
    )
    if trouble:
        yield FaultFinding(kind=FABRIC.id, part=name, quote=f"{name}: registration with the fabric: {trouble}")


def _check_links(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    gpu, name = pair.now, _name(pair.now)
    if isinstance(gpu.links, Unknown):
        return
    switched = not isinstance(gpu.fabric, Unknown) and gpu.fabric.state == COMPLETED
    old = {} if pair.before is None or isinstance(pair.before.links, Unknown) else {link.link: link for link in pair.before.links}
    for link in gpu.links:
        was = old.get(link.link)
        if link.active is False and (switched or (was is not None and was.active is True)):
            yield FaultFinding(kind=NVLINK_DOWN.id, part=f"{name} link {link.link}", quote=f"{name}: NVLink {link.link} is inactive")
        if was is not None and (errors := _link_errors(pair, was, link)):
            yield FaultFinding(kind=NVLINK_ERRORS.id, part=f"{name} link {link.link}", quote=f"{name}: NVLink {link.link}: {errors}")


def _link_errors(pair: ReadingPair[Gpu], was: NvLink, link: NvLink) -> str:
    again = (grown(was.replays, link.replays) or 0) + (grown(was.recoveries, link.recoveries) or 0)
    crc = (grown(was.crc_flit, link.crc_flit) or 0) + (grown(was.crc_data, link.crc_data) or 0)
    if again >= pair.limits.nvlink_errors:
        return f"{again} replays and recoveries, {crc} CRC errors"
    return f"{crc} CRC errors in {pair.seconds:.0f} s" if pair.rate(crc, SECOND) >= pair.limits.nvlink_crc_per_second else ""


def _check_bus(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    """Check the PCIe link. An idle GPU may lower its speed to save power, but never its width."""
    gpu, name = pair.now, _name(pair.now)
    if isinstance(gpu.pcie, Unknown):
        return
    link, found = gpu.pcie, []
    if not isinstance(link.width, Unknown) and above(link.width_most, link.width):
        found.append(f"{link.width} of {link.width_most} lanes")
    busy = above(gpu.utilization, 0) and not isinstance(gpu.clocks, Unknown) and gpu.clocks.performance_state == 0
    if busy and not isinstance(link.generation, Unknown) and above(link.generation_most, link.generation):
        found.append(f"generation {link.generation} of {link.generation_most} while it computes")
    if found:
        yield FaultFinding(kind=PCIE.id, part=name, quote=f"{name}: PCIe with {' and '.join(found)}")
    old = pair.before.pcie.replays if pair.before and not isinstance(pair.before.pcie, Unknown) else None
    more = grown(old, link.replays) or 0
    if pair.rate(more, MINUTE) > pair.limits.pcie_replays_per_minute:
        yield FaultFinding(kind=REPLAYS.id, part=name, quote=f"{name}: {more} PCIe replays in {pair.seconds:.0f} s")


def _check_strangers(pair: ReadingPair[Gpu]) -> Iterator[FaultFinding]:
    gpu, name = pair.now, _name(pair.now)
    if isinstance(gpu.processes, Unknown):
        return
    jobs = {one.job for one in gpu.processes if one.job and not isinstance(one.job, Unknown)}
    strangers = [str(one.pid) for one in gpu.processes if one.job == ""]
    if jobs and strangers:
        quote = f"{name}: process {', '.join(strangers)} computes on the GPU of job {', '.join(sorted(map(str, jobs)))}"
        yield FaultFinding(kind=STRANGER.id, part=name, quote=quote)


_CHECKS: Final = (
    _check_whole,
    _check_ecc,
    _check_rows,
    _check_pages,
    _check_clocks,
    _check_power,
    _check_spinning,
    _check_fabric,
    _check_links,
    _check_bus,
    _check_strangers,
)
