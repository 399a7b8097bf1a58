"""From what NVML tells to faults of GPUs, their links and their driver. Bits and codes are NVML's, see `gpu.NVML`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from detectors import gpu as kinds
from detectors.evidence import Unknown
from detectors.findings import MINUTE, SECOND, FaultFinding, Look, above, grown
from detectors.gpu_readings import Gpu, GpuReading, NvLink

LIB_MISMATCH: Final = 18
NOT_LOADED: Final = 9
IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
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


def judge_gpus(look: Look[GpuReading]) -> Iterator[FaultFinding]:
    """Yield what is wrong with a node's driver and GPUs."""
    yield from _driver(look.now)
    before = {} if look.before is None or isinstance(look.before.gpus, Unknown) else {_name(gpu): gpu for gpu in look.before.gpus}
    if isinstance(look.now.gpus, Unknown):
        return
    for gpu in look.now.gpus:
        for judge in _JUDGES:
            yield from judge(Look(now=gpu, before=before.get(_name(gpu)), seconds=look.seconds, limits=look.limits))
    if not any(isinstance(gpu.bus, Unknown) for gpu in look.now.gpus):  # one without an address may be any of those before
        for name in sorted(set(before) - {_name(gpu) for gpu in look.now.gpus}):
            yield FaultFinding(kind=kinds.OFF_BUS.id, part=name, quote=f"{name} is no longer among the GPUs of the node")


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}" if isinstance(gpu.bus, Unknown) else f"GPU {gpu.bus}"


def _driver(now: GpuReading) -> Iterator[FaultFinding]:
    why = now.gpus.why if isinstance(now.gpus, Unknown) else ""
    versions = now.module_version, now.driver_version
    if now.failed == LIB_MISMATCH:
        yield FaultFinding(kind=kinds.DRIVER_MISMATCH.id, part="driver", quote=f"{why}; the loaded module is {now.module_version}")
    elif now.failed == NOT_LOADED:
        if now.on_bus and not isinstance(now.on_bus, Unknown):
            yield FaultFinding(kind=kinds.DRIVER_MISSING.id, part="driver", quote=f"{why}; the bus has {', '.join(now.on_bus)}")
    elif now.failed:
        yield FaultFinding(kind=kinds.UNUSABLE.id, part="driver", quote=why)
    elif not any(isinstance(version, Unknown) for version in versions) and versions[0] != versions[1]:
        yield FaultFinding(
            kind=kinds.DRIVER_MISMATCH.id, part="driver", quote=f"the loaded module is {versions[0]}, NVML says {versions[1]}"
        )


def _whole(look: Look[Gpu]) -> Iterator[FaultFinding]:
    """Judge whether a GPU can be used at all."""
    gpu, name = look.now, _name(look.now)
    if gpu.failed == IS_LOST:
        yield FaultFinding(kind=kinds.OFF_BUS.id, part=name, quote=f"{name}: NVML says that it is lost")
    elif gpu.failed == RESET_REQUIRED:
        yield FaultFinding(kind=kinds.RESET_REQUIRED.id, part=name, quote=f"{name}: NVML says that it needs a reset")
    elif gpu.failed:
        why = gpu.bus.why if isinstance(gpu.bus, Unknown) else f"NVML error {gpu.failed}"
        yield FaultFinding(kind=kinds.UNUSABLE.id, part=name, quote=f"{name}: {why}")
    elif not isinstance(gpu.recovery_action, Unknown) and gpu.recovery_action:
        wish = ASKED_FOR.get(gpu.recovery_action, f"for action {gpu.recovery_action}")
        yield FaultFinding(kind=kinds.RESET_REQUIRED.id, part=name, quote=f"{name}: the driver asks {wish}")


def _ecc(look: Look[Gpu]) -> Iterator[FaultFinding]:
    """Judge errors since the driver was loaded, or since the look before."""
    ecc, name = look.now.ecc, _name(look.now)
    if isinstance(ecc, Unknown):
        return
    known = look.before is not None and not isinstance(look.before.ecc, Unknown) and look.before.ecc.volatile_uncorrected
    old = known if isinstance(known, int) else 0
    if more := grown(old, ecc.volatile_uncorrected):
        lifelong = "" if isinstance(ecc.aggregate_uncorrected, Unknown) else f", {ecc.aggregate_uncorrected} in its life"
        yield FaultFinding(kind=kinds.ECC.id, part=name, quote=f"{name}: {more} uncorrectable memory error(s){lifelong}")


def _rows(look: Look[Gpu]) -> Iterator[FaultFinding]:
    rows, name = look.now.rows, _name(look.now)
    if isinstance(rows, Unknown):
        return
    if rows.failed:
        yield FaultFinding(kind=kinds.REMAP_FAILED.id, part=name, quote=f"{name}: a memory row could not be replaced")
    elif rows.pending:
        yield FaultFinding(kind=kinds.REMAP_PENDING.id, part=name, quote=f"{name}: a memory row waits for a reset to be replaced")


def _pages(look: Look[Gpu]) -> Iterator[FaultFinding]:
    pages, name = look.now.pages, _name(look.now)
    if isinstance(pages, Unknown):
        return
    count, most = pages.single_bit + pages.double_bit, look.limits.retired_pages
    if pages.pending or count >= most:
        pending = ", more are pending" if pages.pending else ""
        yield FaultFinding(kind=kinds.PAGES.id, part=name, quote=f"{name}: {count} retired pages, and {most} are the limit{pending}")


def _clocks(look: Look[Gpu]) -> Iterator[FaultFinding]:
    """Judge heat, and what holds the clocks down."""
    gpu, name = look.now, _name(look.now)
    reasons = 0 if isinstance(gpu.clocks, Unknown) or isinstance(gpu.clocks.reasons, Unknown) else gpu.clocks.reasons
    hot = [words for bit, words in THERMAL.items() if reasons & bit]
    if not isinstance(gpu.heat, Unknown) and _reached(gpu.heat.gpu, gpu.heat.slowdown_at):
        hot.append(f"{gpu.heat.gpu} °C, and it slows down at {gpu.heat.slowdown_at} °C")
    if hot:
        yield FaultFinding(kind=kinds.THROTTLE.id, part=name, quote=f"{name}: {', '.join(hot)}")
    if reasons & BRAKE:
        yield FaultFinding(kind=kinds.POWER_BRAKE.id, part=name, quote=f"{name}: hardware power brake slowdown")
    elif reasons & HW_SLOWDOWN and not hot:
        yield FaultFinding(kind=kinds.SLOWDOWN.id, part=name, quote=f"{name}: hardware slowdown")


def _reached(value: int | Unknown, limit: int | Unknown) -> bool:
    """Say whether *value* is at *limit*; drivers that no longer tell a limit may say 0."""
    return not isinstance(value, Unknown) and not isinstance(limit, Unknown) and 0 < limit <= value


def _power(look: Look[Gpu]) -> Iterator[FaultFinding]:
    power, name = look.now.power, _name(look.now)
    if isinstance(power, Unknown) or isinstance(power.limit, Unknown) or isinstance(power.default_limit, Unknown):
        return
    if power.limit < power.default_limit:
        quote = f"{name}: at most {power.limit / 1000:g} W, made for {power.default_limit / 1000:g} W"
        yield FaultFinding(kind=kinds.POWER_CAPPED.id, part=name, quote=quote)


def _fabric(look: Look[Gpu]) -> Iterator[FaultFinding]:
    fabric, name = look.now.fabric, _name(look.now)
    if isinstance(fabric, Unknown):
        return
    trouble = STARTING.get(fabric.state) or (
        f"ended with NVML error {fabric.status}" if fabric.state == COMPLETED and fabric.status else ""
    )
    if trouble:
        yield FaultFinding(kind=kinds.FABRIC.id, part=name, quote=f"{name}: registration with the fabric: {trouble}")


def _links_of(look: Look[Gpu]) -> Iterator[FaultFinding]:
    gpu, name = look.now, _name(look.now)
    if isinstance(gpu.links, Unknown):
        return
    switched = not isinstance(gpu.fabric, Unknown) and gpu.fabric.state == COMPLETED
    old = {} if look.before is None or isinstance(look.before.links, Unknown) else {link.link: link for link in look.before.links}
    for link in gpu.links:
        was = old.get(link.link)
        if link.active is False and (switched or (was is not None and was.active is True)):
            yield FaultFinding(kind=kinds.NVLINK_DOWN.id, part=f"{name} link {link.link}", quote=f"{name}: NVLink {link.link} is inactive")
        if was is not None and (errors := _link_errors(look, was, link)):
            yield FaultFinding(kind=kinds.NVLINK_ERRORS.id, part=f"{name} link {link.link}", quote=f"{name}: NVLink {link.link}: {errors}")


def _link_errors(look: Look[Gpu], was: NvLink, link: NvLink) -> str:
    again = (grown(was.replays, link.replays) or 0) + (grown(was.recoveries, link.recoveries) or 0)
    crc = (grown(was.crc_flit, link.crc_flit) or 0) + (grown(was.crc_data, link.crc_data) or 0)
    if again >= look.limits.nvlink_errors:
        return f"{again} replays and recoveries, {crc} CRC errors"
    return f"{crc} CRC errors in {look.seconds:.0f} s" if look.rate(crc, SECOND) >= look.limits.nvlink_crc_per_second else ""


def _bus(look: Look[Gpu]) -> Iterator[FaultFinding]:
    """Judge the PCIe link. An idle GPU may slow it down to save power, but never gives lanes up."""
    gpu, name = look.now, _name(look.now)
    if isinstance(gpu.pcie, Unknown):
        return
    link, found = gpu.pcie, []
    if not isinstance(link.width, Unknown) and above(link.width_most, link.width):
        found.append(f"{link.width} of {link.width_most} lanes")
    busy = above(gpu.utilization, 0) and not isinstance(gpu.clocks, Unknown) and gpu.clocks.performance_state == 0
    if busy and not isinstance(link.generation, Unknown) and above(link.generation_most, link.generation):
        found.append(f"generation {link.generation} of {link.generation_most} while it computes")
    if found:
        yield FaultFinding(kind=kinds.PCIE.id, part=name, quote=f"{name}: PCIe with {' and '.join(found)}")
    old = look.before.pcie.replays if look.before and not isinstance(look.before.pcie, Unknown) else None
    more = grown(old, link.replays) or 0
    if look.rate(more, MINUTE) > look.limits.pcie_replays_per_minute:
        yield FaultFinding(kind=kinds.REPLAYS.id, part=name, quote=f"{name}: {more} PCIe replays in {look.seconds:.0f} s")


def _strangers(look: Look[Gpu]) -> Iterator[FaultFinding]:
    gpu, name = look.now, _name(look.now)
    if isinstance(gpu.processes, Unknown):
        return
    jobs = {one.job for one in gpu.processes if one.job and not isinstance(one.job, Unknown)}
    strangers = [str(one.pid) for one in gpu.processes if one.job == ""]
    if jobs and strangers:
        quote = f"{name}: process {', '.join(strangers)} computes beside job {', '.join(sorted(map(str, jobs)))}"
        yield FaultFinding(kind=kinds.STRANGER.id, part=name, quote=quote)


_JUDGES: Final = (_whole, _ecc, _rows, _pages, _clocks, _power, _fabric, _links_of, _bus, _strangers)
