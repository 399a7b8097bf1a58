"""Faults in what DCGM's health check says of GPUs.

`dcgmi` prints the messages of errors and not their codes, so that each is recognised by its message. DCGM's table of errors says for each
what has to be done (`dcgmlib/src/dcgm_errors.c`), and its health check whether it is a failure (`modules/health/DcgmHealthWatch.cpp`). One
acts where DCGM says that it failed and that the GPU has to be isolated or reset, where a reading of the GPU by NVML would act, and where
the GPU is known to be one of the node's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.detectors.catalogue import CATALOGUE, TAKES_NODE_OUT
from holdfast.detectors.nodes import gpu
from holdfast.detectors.nodes.findings import FaultFinding, ReadingPair
from holdfast.detectors.nodes.readings import DcgmIncident, DcgmReading


class Severity(StrEnum):
    """What DCGM's table of errors says of one."""

    MONITOR = "monitor"
    TRIAGE = "triage"
    RESET = "reset"
    ISOLATE = "isolate"


ACTS: Final = frozenset({Severity.RESET, Severity.ISOLATE})
FAILURE: Final = "Failure"
WARNING: Final = "Warning"
FATAL_KIND: Final = "node-monitor-fatal"
WARNING_KIND: Final = "node-monitor-warning"
XID_KIND: Final = "node-monitor-xid"
"""Kinds of `signatures/node_monitors.toml`."""
INFOROM_KIND: Final = "gpu-inforom"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmError:
    """One error of DCGM's health check."""

    code: str
    """Its name, without `DCGM_FR_`."""
    message: re.Pattern[str]
    severity: Severity
    kind: str
    """The fault kind; empty: none."""
    fails: bool = False
    """The health check reports it as a failure."""


def _error(code: str, message: str, severity: Severity, kind: str, *, fails: bool = False) -> DcgmError:
    return DcgmError(code=code, message=re.compile(message.replace(" ", r"\s+")), severity=severity, kind=kind, fails=fails)


ERRORS: Final = (
    _error(
        "VOLATILE_DBE_DETECTED",
        r"Detected \d+ volatile double-bit ECC error\(s\) in GPU (?P<gpu>\d+)",
        Severity.ISOLATE,
        gpu.ECC.id,
        fails=True,
    ),
    _error(
        "RETIRED_PAGES_LIMIT",
        r"\d+ or more retired pages have been detected in GPU (?P<gpu>\d+)",
        Severity.ISOLATE,
        gpu.PAGES.id,
        fails=True,
    ),
    _error(
        "RETIRED_PAGES_DBE_LIMIT",
        r"An excess of \d+ retired pages due to DBEs have been detected and more than one page has been retired due to DBEs in the past "
        r"week in GPU (?P<gpu>\d+)",
        Severity.ISOLATE,
        gpu.PAGES.id,
        fails=True,
    ),
    _error("PENDING_PAGE_RETIREMENTS", r"A pending retired page has been detected in GPU (?P<gpu>\d+)", Severity.RESET, gpu.PAGES.id),
    # The number in its message is not that of the GPU: versions of the health check leave it out.
    _error(
        "ROW_REMAP_FAILURE",
        r"GPU \d+ had uncorrectable memory errors and row remapping failed",
        Severity.ISOLATE,
        gpu.REMAP_FAILED.id,
        fails=True,
    ),
    _error(
        "PENDING_ROW_REMAP",
        r"GPU (?P<gpu>\d+) (?:had|has uncorrectable) memory errors and row remappings are pending",
        Severity.RESET,
        gpu.REMAP_PENDING.id,
    ),
    # It stays until the host engine is started again, whatever has become of the GPU: no reason to leave a node by itself.
    _error("UNCONTAINED_ERROR", r"GPU had an uncontained error \(XID 95\)", Severity.ISOLATE, FATAL_KIND, fails=True),
    _error("CORRUPT_INFOROM", r"A corrupt InfoROM has been detected in GPU (?P<gpu>\d+)", Severity.TRIAGE, INFOROM_KIND),
    _error(
        "CLOCKS_EVENT_THERMAL",
        r"Detected (?:clocks event|clock throttling) due to thermal violation in GPU (?P<gpu>\d+)",
        Severity.MONITOR,
        gpu.THROTTLE.id,
    ),
    # A GPU that works hard is held at its power limit.
    _error("CLOCKS_EVENT_POWER", r"Detected (?:clocks event|clock throttling) due to power violation in GPU \d+", Severity.MONITOR, ""),
    _error("POWER_UNREADABLE", r"Cannot reliably read the power usage for GPU (?P<gpu>\d+)", Severity.MONITOR, WARNING_KIND),
    _error(
        "NVLINK_ERROR_THRESHOLD",
        r"Detected \d+ \S+ NvLink errors on GPU (?P<gpu>\d+)'s NVLink which exceeds",
        Severity.ISOLATE,
        gpu.NVLINK_ERRORS.id,
    ),
    _error(
        "NVLINK_ERROR_CRITICAL",
        r"Detected \d+ \S+ NvLink errors on GPU (?P<gpu>\d+)'s NVLink \(should be 0\)",
        Severity.ISOLATE,
        gpu.NVLINK_ERRORS.id,
        fails=True,
    ),
    _error(
        "NVLINK_CRC_ERROR_THRESHOLD",
        r"NvLink errors found occuring per second on GPU (?P<gpu>\d+)",  # codespell:ignore occuring
        Severity.ISOLATE,
        gpu.NVLINK_ERRORS.id,
        fails=True,
    ),
    # It is reported of cards that have no NVLink too.
    _error("NVLINK_DOWN", r"GPU (?P<gpu>\d+)'s NvLink link \d+ is currently down", Severity.TRIAGE, gpu.NVLINK_DOWN.id, fails=True),
    _error("NVSWITCH_FATAL_ERROR", r"Detected fatal errors on NvSwitch \d+ link \d+", Severity.ISOLATE, FATAL_KIND, fails=True),
    _error("NVSWITCH_NON_FATAL_ERROR", r"Detected nonfatal errors on NvSwitch \d+ link \d+", Severity.MONITOR, WARNING_KIND),
    _error("SXID_ERROR", r"Detected fatal NvSwitch SXID \d+", Severity.ISOLATE, FATAL_KIND, fails=True),
    _error("PCI_REPLAY_RATE", r"Detected more than \d+ PCIe replays per minute for GPU (?P<gpu>\d+)", Severity.ISOLATE, gpu.REPLAYS.id),
    # The number of the last Xid, which stays when the fault is over.
    _error("XID_ERROR", r"Detected XID \d+ for GPU (?P<gpu>\d+)", Severity.TRIAGE, XID_KIND),
    # There is no such daemon on a healthy node without a multi-node NVLink domain.
    _error("IMEX_UNHEALTHY", r"IMEX (?:daemon|domain) status is", Severity.TRIAGE, "", fails=True),
)
"""The errors of the health check, of DCGM 2 to 4."""
COUNTERS: Final = frozenset({gpu.ECC.id})
"""Kinds of counters: one that has not grown since the reading before is over."""


def judge_dcgm(pair: ReadingPair[DcgmReading]) -> Iterator[FaultFinding]:
    """Find what DCGM says of GPUs and NVSwitches."""
    before = {(one.entity, one.message) for one in pair.before.incidents} if pair.before is not None else set()
    for incident in pair.now.incidents:
        for one in _of(incident, pair.now):
            if one.kind not in COUNTERS or (incident.entity, incident.message) not in before:
                yield one
    if not pair.now.incidents and pair.now.overall in {FAILURE, WARNING}:
        # Versions of `dcgmi` leave out a device that has one incident only.
        kind = FATAL_KIND if pair.now.overall == FAILURE else WARNING_KIND
        yield FaultFinding(kind=kind, part="DCGM", quote=f"overall health of the GPUs: {pair.now.overall}, and `dcgmi` does not say why")


def _of(incident: DcgmIncident, now: DcgmReading) -> Iterator[FaultFinding]:
    """Find what one incident says: its messages stand one after the other, each with a recommendation."""
    from holdfast.detectors.log_lines import classification  # noqa: F401, PLC0415 (loads a thousand signatures: only who has incidents does)

    found = [(error, match) for error in ERRORS for match in error.message.finditer(incident.message)]
    for error, match in found:
        if error.kind:
            named = match.groupdict().get("gpu")
            bus = _bus(incident, named, now)
            kind = _kind(error, incident, bus=bus)
            yield FaultFinding(kind=kind, part=_part(incident, bus), quote=_words(incident, incident.message[match.start() :]))
    if not found or (incident.health == FAILURE and not any(error.fails for error, _ in found)):
        yield FaultFinding(kind=WARNING_KIND, part=_part(incident, _bus(incident, None, now)), quote=_words(incident, incident.message))


def _bus(incident: DcgmIncident, named: str | None, now: DcgmReading) -> str:
    """Return the address of the GPU of an incident; empty where report and message disagree, or the node has no such GPU."""
    kind, _, number = incident.entity.partition(" ")
    return now.gpus.get(number, "") if kind == "GPU" and named in {None, number} else ""


def _part(incident: DcgmIncident, bus: str) -> str:
    return f"GPU {bus}" if bus else f"DCGM {incident.entity}"


def _kind(error: DcgmError, incident: DcgmIncident, *, bus: str) -> str:
    """Return the kind of an error, or that of a warning where its kind would act and DCGM's report does not suffice for that."""
    acts = error.severity in ACTS and error.fails and incident.health == FAILURE
    if error.kind == FATAL_KIND:
        return FATAL_KIND if acts else WARNING_KIND
    return error.kind if (acts and bus) or CATALOGUE[error.kind].recommended_action not in TAKES_NODE_OUT else WARNING_KIND


def _words(incident: DcgmIncident, message: str) -> str:
    return f"DCGM, {incident.entity}, {incident.system}, {incident.health}: {message or 'it does not say why'}"[:300]
