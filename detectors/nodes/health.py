"""Node readings to faults: one reading shows current faults, two show what happened between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from holdfast.detectors.catalogue import DCGM, KERNEL_LOG, NODE_CONDITIONS, Fault
from holdfast.detectors.evidence import NOT_REQUESTED, HangLimits, Unknown
from holdfast.detectors.nodes.dcgm import judge_dcgm
from holdfast.detectors.nodes.findings import THRESHOLDS, FaultFinding, ReadingPair, Thresholds
from holdfast.detectors.nodes.gpu import judge_gpus
from holdfast.detectors.nodes.host import REBOOTED, judge_clock, judge_host, judge_processes, judge_services
from holdfast.detectors.nodes.kubernetes import judge_kubernetes
from holdfast.detectors.nodes.network import judge_network
from holdfast.detectors.nodes.readings import CounterGrowth, KernelLine, KernelReading, NodeReading
from holdfast.detectors.nodes.storage import judge_storage

JUDGES: Final[Mapping[str, Callable[[ReadingPair[Any]], Iterator[FaultFinding]]]] = {
    "gpus": judge_gpus,
    "network": judge_network,
    "storage": judge_storage,
    "host": judge_host,
    "clock": judge_clock,
    "services": judge_services,
    "processes": judge_processes,
    "dcgm": judge_dcgm,
    "kubernetes": judge_kubernetes,
}
"""The check of each part of a `NodeReading`; the kernel log is matched line by line."""
_INSTRUMENTS: Final = {
    "gpus": "NVML",
    "network": "interface counters",
    "storage": "storage check",
    "processes": "process table",
    "kubernetes": NODE_CONDITIONS,
    "dcgm": DCGM,
}
"""The source of a part, if its name does not say it."""
_QUOTED: Final = (NODE_CONDITIONS, KERNEL_LOG)
"""Sources whose findings are lines, which may prove a fault or not."""


def judge(now: NodeReading, before: NodeReading | None = None, limits: Thresholds = THRESHOLDS) -> list[Fault]:
    """Return the faults of a reading, and of the changes since the reading *before* if there is one."""
    return [_fault(finding, now, source) for source, finding in fault_findings(now, before, limits)]


def fault_findings(now: NodeReading, before: NodeReading | None = None, limits: Thresholds = THRESHOLDS) -> list[tuple[str, FaultFinding]]:
    """Return the findings behind `judge`: one per kind and part, with its source."""
    again = before is not None and _boot(before) == _boot(now)
    rebooted = before is not None and None not in {_boot(before), _boot(now)} and not again
    earlier = before if again or not rebooted else None  # counters of another boot mean nothing for this one
    seen: list[tuple[str, FaultFinding]] = []
    if rebooted:
        seen.append(("host check", FaultFinding(kind=REBOOTED.id, part="node", quote="its boot id changed")))
    for name, judged in JUDGES.items():
        part, old = getattr(now, name), getattr(earlier, name, None)
        if not isinstance(part, Unknown):
            seconds = now.at - earlier.at if earlier is not None else 0.0
            pair = ReadingPair(now=part, before=None if isinstance(old, Unknown) else old, seconds=seconds, limits=limits)
            seen += [(_INSTRUMENTS.get(name, f"{name} check"), finding) for finding in judged(pair)]
    seen += [(KERNEL_LOG, finding) for finding in _told(now, earlier, limits)]
    first: dict[tuple[str, str], tuple[str, FaultFinding]] = {}
    for source, finding in seen:  # NVML and the kernel log report one fault in different words
        known = first.setdefault((finding.kind, finding.part), (source, finding))
        if source in _QUOTED and known[0] in _QUOTED and not known[1].is_proof and finding.is_proof:
            first[finding.kind, finding.part] = source, finding
    return list(first.values())


def _fault(seen: FaultFinding, now: NodeReading, source: str) -> Fault:
    source = f"{seen.source or source} on {now.node}"
    return Fault(
        kind=seen.kind, at=now.at, node=now.node, quote=seen.quote, signature=f"{seen.kind} {seen.part}", source=source, device=seen.part
    )


def _boot(reading: NodeReading) -> str | None:
    return None if isinstance(reading.host, Unknown) or isinstance(reading.host.boot, Unknown) else reading.host.boot


def _told(now: NodeReading, before: NodeReading | None, limits: Thresholds) -> Iterator[FaultFinding]:
    """Match the new lines of the kernel log."""
    lines = list(_new_lines(now, before, limits))
    if not lines:
        return
    from holdfast.detectors.log_lines.kernel_lines import finding_of  # noqa: PLC0415 (a thousand signatures: only who has lines reads them)

    yield from (seen for line in lines if (seen := finding_of(line)) is not None)


def _new_lines(now: NodeReading, before: NodeReading | None, limits: Thresholds) -> Iterator[KernelLine]:
    """Yield the lines since the previous reading; without one, the recent lines by the node's uptime, if known."""
    if isinstance(now.kernel, Unknown):
        return
    if before is not None and isinstance(before.kernel, KernelReading):
        last = max((line.sequence for line in before.kernel.lines), default=-1)
        yield from (line for line in now.kernel.lines if line.sequence > last)
        return
    up = None if isinstance(now.host, Unknown) or isinstance(now.host.uptime, Unknown) else now.host.uptime
    yield from (line for line in now.kernel.lines if up is None or line.microseconds / 1e6 >= up - limits.recent)


def see_reading(seen: NodeReading, _limits: HangLimits) -> list[Fault]:
    """Return the faults of one reading."""
    return judge(seen)


def see_growth(seen: CounterGrowth, _limits: HangLimits) -> list[Fault]:
    """Return the faults of two readings."""
    return judge(seen.now, seen.before)


def unknown_signals(evidence: Any, where: str = "") -> Iterator[tuple[str, str]]:  # noqa: ANN401 (any evidence)
    """Yield the unknown values in *evidence*, with the reason; values that were not requested do not count."""
    if isinstance(evidence, Unknown):
        if evidence != NOT_REQUESTED:
            yield where, evidence.why
    elif dataclasses.is_dataclass(evidence):
        for field in dataclasses.fields(evidence):
            yield from unknown_signals(getattr(evidence, field.name), f"{where}.{field.name}".lstrip("."))
    elif isinstance(evidence, tuple):
        for number, item in enumerate(evidence):
            yield from unknown_signals(item, f"{where}[{label(item, number)}]")


def label(item: Any, number: int) -> str:  # noqa: ANN401
    """Return the label of an item: its name, if it has one."""
    names = (getattr(item, name, None) for name in ("path", "name", "index", "device"))
    return str(next((name for name in names if isinstance(name, str | int)), number))
