"""Faults of a node's processors, memory, clock, processes and services."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from holdfast.detectors.catalogue import Attribution, RecommendedAction, fault_kind
from holdfast.detectors.evidence import Sample, Unknown
from holdfast.detectors.nodes.findings import HOUR, MINUTE, FaultFinding, ReadingPair, above, grown
from holdfast.detectors.nodes.readings import (
    ClockReading,
    CounterGrowth,
    HostReading,
    NodeReading,
    Pressure,
    ProcessReading,
    ServiceReading,
    ServiceState,
    StuckProcess,
)
from holdfast.plurals import plural

_GB: Final = 10**9
_HOST: Final = HostReading(
    boot="a",
    uptime=86400.0,
    processors=64,
    load_5m=70.0,
    memory_total=512 * _GB,
    memory_available=300 * _GB,
    memory_pressure=Pressure(some_60s=1.0, full_60s=0.5),
    oom_kills=2,
    memory_errors_corrected=5,
    memory_errors_uncorrected=0,
    throttled=40,
    clock_source="tsc",
    clock_sources=("tsc", "hpet", "acpi_pm"),
    files_open=5000,
    files_most=1_000_000,
)


def _look(at: float = 0.0, **facts: Any) -> NodeReading:  # noqa: ANN401 (fields of a HostReading)
    return NodeReading(node="n0", at=at, host=dataclasses.replace(_HOST, **facts))


def _now(**facts: Any) -> Sample:  # noqa: ANN401
    return Sample(_look(**facts))


def _hour_later(**facts: Any) -> Sample:  # noqa: ANN401
    return Sample(CounterGrowth(before=_look(), now=_look(3600.0, **facts)))


def _clock(*, synchronized: bool, offset: float) -> Sample:
    clock = ClockReading(synchronized=synchronized, offset=offset, worst=0.1)
    return Sample(NodeReading(node="n0", at=0.0, clock=clock))


def _process(state: str, *, at: float, pid: int = 10, switches: int = 500) -> NodeReading:
    stuck = StuckProcess(pid=pid, name="python", state=state, age=at + 5.0, wait="nvidia_ioctl", switches=switches)
    return NodeReading(node="n0", at=at, processes=ProcessReading(count=300, stuck=(stuck,)))


def _minute_later(state: str, **facts: int) -> Sample:
    return Sample(CounterGrowth(before=_process(state, at=0.0), now=_process(state, at=60.0, **facts)))


def _service(*, needed: bool) -> Sample:
    service = ServiceState(name="fabric manager", present=True, running=False, needed=needed)
    return Sample(NodeReading(node="n0", at=0.0, services=ServiceReading(services=(service,))))


_define = partial(
    fault_kind,
    component="host",
    source="/proc and /sys",
    attributed_to=Attribution.NODE,
    recommended_action=RecommendedAction.MONITOR,
    weight=56,
)
_PROC: Final = "https://docs.kernel.org/filesystems/proc.html"
_EDAC: Final = "https://docs.kernel.org/driver-api/edac.html"

REBOOTED: Final = _define(
    id="node-rebooted",
    title="A node rebooted since the previous reading",
    action="find out who rebooted it; otherwise check the kernel log of the previous boot and the power supply",
    reference="https://man7.org/linux/man-pages/man4/random.4.html",
    unhealthy=_hour_later(boot="b"),
    healthy=_hour_later(),
    weight=96,
)
MEMORY: Final = _define(
    id="memory-pressure",
    title="A node has almost no memory left, or stalls for lack of memory",
    action="find what uses it; reduce the job's memory or its data loaders",
    reference="https://docs.kernel.org/accounting/psi.html",
    unhealthy=_now(memory_available=5 * _GB),
    healthy=_now(memory_available=60 * _GB, memory_pressure=Pressure(some_60s=40.0, full_60s=10.0)),
)
OOM: Final = _define(
    id="host-oom-kill",
    title="The kernel killed processes because memory ran out",
    action="see the kernel log for which process; find what uses the memory",
    reference="https://docs.kernel.org/admin-guide/mm/concepts.html#oom-killer",
    unhealthy=_hour_later(oom_kills=3),
    healthy=_hour_later(oom_kills=2),
)
MEMORY_LOST: Final = _define(
    id="memory-ecc-uncorrectable",
    title="A node has uncorrectable memory errors",
    recommended_action=RecommendedAction.EVICT,
    action="replace the node, and the memory module that the log names",
    reference=_EDAC,
    unhealthy=_now(memory_errors_uncorrected=1),
    healthy=_now(memory_errors_uncorrected=Unknown("nothing counts there")),
    weight=88,
)
MEMORY_WORN: Final = _define(
    id="memory-ecc-corrected",
    title="A node has many corrected memory errors",
    action="plan to replace the memory module that the log names",
    reference=_EDAC,
    unhealthy=_hour_later(memory_errors_corrected=5000),
    healthy=_hour_later(memory_errors_corrected=9),
)
THROTTLED: Final = _define(
    id="cpu-throttled",
    title="A node's processors throttle because of heat",
    action="check cooling; its ranks slow down all others",
    reference="https://docs.kernel.org/admin-guide/abi-testing-files.html#abi-file-testing-sysfs-devices-system-cpu",
    unhealthy=_hour_later(throttled=4000),
    healthy=_hour_later(throttled=41),
)
LOAD: Final = _define(
    id="host-overloaded",
    title="A node has many more runnable processes than processors",
    action="find foreign processes; reduce the number of data loaders",
    reference=_PROC,
    unhealthy=_now(load_5m=400.0),
    healthy=_now(load_5m=120.0),
)
FILES: Final = _define(
    id="files-exhausted",
    title="A node is close to its limit of open files",
    action="find what keeps them open (`lsof`), or raise `fs.file-max`",
    reference="https://docs.kernel.org/admin-guide/sysctl/fs.html",
    unhealthy=_now(files_open=990_000),
    healthy=_now(files_open=500_000),
)
CLOCK_SOURCE: Final = _define(
    id="clock-source-slow",
    title="The kernel stopped using its fast clock source, so reading the time is slow",
    action="see the kernel log for why; reboot, replace the node if it happens again",
    reference="https://docs.kernel.org/timers/timekeeping.html",
    unhealthy=_now(clock_source="hpet"),
    healthy=_now(clock_source="kvm-clock"),
)
CLOCK: Final = _define(
    id="clock-offset",
    title="A node's clock is too far off to order log lines of different nodes",
    source="adjtimex",
    action="check whether its time service reaches a server",
    reference="https://man7.org/linux/man-pages/man2/adjtimex.2.html",
    unhealthy=_clock(synchronized=True, offset=4.2),
    healthy=_clock(synchronized=True, offset=0.002),
)
CLOCK_ALONE: Final = _define(
    id="clock-unsynchronized",
    title="A node's clock is not synchronized",
    source="adjtimex",
    recommended_action=RecommendedAction.RECORD,
    action="run a time service (chronyd); on a virtual machine the host may do it",
    reference="https://man7.org/linux/man-pages/man2/adjtimex.2.html",
    unhealthy=_clock(synchronized=False, offset=0.0),
    healthy=_clock(synchronized=True, offset=0.0),
)
STUCK: Final = _define(
    id="process-stuck",
    title="A process stayed in uninterruptible sleep between two readings",
    action="find what it waits for: a dead server, a disk, a GPU; only that or a reboot can end it",
    reference="https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html",
    unhealthy=_minute_later("D"),
    healthy=_minute_later("D", switches=900),
)
ZOMBIE: Final = _define(
    id="process-zombie",
    title="A process stayed a zombie between two readings",
    recommended_action=RecommendedAction.RECORD,
    attributed_to=Attribution.PROCESS,
    action="end its parent; if that is process 1, it does not reap children: start the container with an init (`--init`)",
    reference="https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html",
    unhealthy=_minute_later("Z"),
    healthy=_minute_later("Z", pid=11),
)
SERVICE: Final = _define(
    id="service-down",
    title="A service that a node needs is not running",
    source="processes",
    action="start it; see its log for why it stopped",
    reference="https://docs.nvidia.com/datacenter/tesla/",
    unhealthy=_service(needed=True),
    healthy=_service(needed=False),
)

SLOW_CLOCKS: Final = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})


def judge_host(pair: ReadingPair[HostReading]) -> Iterator[FaultFinding]:
    """Yield faults of a node's processors, memory and uptime."""
    now, limits = pair.now, pair.limits
    yield from _memory(now, pair)
    if (
        not isinstance(now.load_5m, Unknown)
        and not isinstance(now.processors, Unknown)
        and now.load_5m > limits.load * max(now.processors, 1)
    ):
        yield FaultFinding(kind=LOAD.id, part="processors", quote=f"load {now.load_5m:g} on {now.processors} processors")
    if (
        not isinstance(now.files_open, Unknown)
        and not isinstance(now.files_most, Unknown)
        and now.files_open > limits.files_open * now.files_most
    ):
        yield FaultFinding(kind=FILES.id, part="files", quote=f"{now.files_open} of {now.files_most} files are open")
    if now.clock_source in SLOW_CLOCKS:
        yield FaultFinding(kind=CLOCK_SOURCE.id, part="clock", quote=f"clock source {now.clock_source}")
    if pair.before is not None:
        yield from _grown(pair, pair.before)


def _memory(now: HostReading, pair: ReadingPair[HostReading]) -> Iterator[FaultFinding]:
    pressure, total, free = now.memory_pressure, now.memory_total, now.memory_available
    if not isinstance(total, Unknown) and not isinstance(free, Unknown) and free < total * pair.limits.memory_available:
        yield FaultFinding(kind=MEMORY.id, part="memory", quote=f"{free / total:.1%} of memory available")
    elif not isinstance(pressure, Unknown) and pressure.full_60s >= pair.limits.memory_stalled:
        yield FaultFinding(
            kind=MEMORY.id, part="memory", quote=f"all work stalled on memory for {pressure.full_60s:g} % of the last minute"
        )
    known = pair.before.memory_errors_uncorrected if pair.before is not None else 0
    if more := grown(0 if isinstance(known, Unknown) else known, now.memory_errors_uncorrected):
        yield FaultFinding(kind=MEMORY_LOST.id, part="memory", quote=plural(more, "uncorrectable memory error"))


def _grown(pair: ReadingPair[HostReading], before: HostReading) -> Iterator[FaultFinding]:
    now, limits = pair.now, pair.limits
    if kills := grown(before.oom_kills, now.oom_kills):
        yield FaultFinding(
            kind=OOM.id, part="memory", quote=f"{plural(kills, 'process', 'processes')} killed for memory in {pair.seconds:.0f} s"
        )
    corrected = grown(before.memory_errors_corrected, now.memory_errors_corrected) or 0
    if pair.rate(corrected, HOUR) > limits.memory_errors_per_hour:
        yield FaultFinding(kind=MEMORY_WORN.id, part="memory", quote=f"{corrected} corrected memory errors in {pair.seconds:.0f} s")
    throttled = grown(before.throttled, now.throttled) or 0
    if pair.rate(throttled, MINUTE) > limits.throttles_per_minute:
        yield FaultFinding(kind=THROTTLED.id, part="processors", quote=f"{throttled} slow-downs for heat in {pair.seconds:.0f} s")


def judge_clock(pair: ReadingPair[ClockReading]) -> Iterator[FaultFinding]:
    """Yield faults of a node's clock."""
    if not pair.now.synchronized:
        yield FaultFinding(kind=CLOCK_ALONE.id, part="clock", quote="the kernel says that its clock is not synchronized")
    elif above(abs(pair.now.offset), pair.limits.clock_offset):
        yield FaultFinding(kind=CLOCK.id, part="clock", quote=f"{pair.now.offset:+.3f} s are still to be made up for")


def judge_processes(pair: ReadingPair[ProcessReading]) -> Iterator[FaultFinding]:
    """Yield processes that were zombies, or blocked in one wait, since the previous reading."""
    old = {one.pid: one for one in pair.before.stuck} if pair.before is not None else {}
    for one in pair.now.stuck:
        was = old.get(one.pid)
        if was is None or was.state != one.state or one.age < pair.seconds:
            continue
        part, quote = f"process {one.pid}", f"{one.name} ({one.pid}) in state {one.state}"
        if one.state == "Z":
            yield FaultFinding(kind=ZOMBIE.id, part=part, quote=f"{quote}, child of {one.parent}")
        elif not isinstance(one.switches, Unknown) and one.switches == was.switches:
            where = "" if isinstance(one.wait, Unknown) else f", in {one.wait}"
            yield FaultFinding(kind=STUCK.id, part=part, quote=f"{quote}{where}, for {pair.seconds:.0f} s at least")


def judge_services(pair: ReadingPair[ServiceReading]) -> Iterator[FaultFinding]:
    """Yield services that should run and do not."""
    for service in pair.now.services:
        if service.needed and service.running is False:
            why = "" if service.present else ", and is not installed"
            yield FaultFinding(kind=SERVICE.id, part=service.name, quote=f"{service.name} does not run{why}")
