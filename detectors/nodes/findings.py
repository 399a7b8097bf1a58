"""Shared parts of the checks of node readings: findings, thresholds, and counters compared between two readings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from holdfast.detectors.catalogue import CATALOGUE, NODE_EVENTS
from holdfast.detectors.evidence import Unknown

P = TypeVar("P")

SECOND: Final = 1.0
MINUTE: Final = 60.0
HOUR: Final = 3600.0
"""Time units of rates, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Thresholds between healthy readings and faults, each with its source; *ours* marks our own choice."""

    pcie_replays_per_minute: float = 8.0
    """DCGM, dcgm_gpu_hardware_limits.h: "8 replays per minute is the maximum recommended by RM"."""
    nvlink_errors: int = 1
    """Replays or recoveries; DCGM, DCGM_LIMIT_MAX_NVLINK_ERROR."""
    nvlink_crc_per_second: float = 100.0
    """DCGM, DCGM_LIMIT_MAX_NVLINK_CRC_ERROR: "CRC errors only matter at rates of 100+ per second"."""
    spinning_utilization: int = 98
    """Percent of the time in which a kernel runs (ours): one that waits for other GPUs never ends."""
    spinning_power: float = 0.3
    """Share of the power limit (ours): a kernel that only waits draws little more than an idle GPU, one that computes most of the limit."""
    retired_pages: int = 63
    """DCGM, DCGM_LIMIT_MAX_RETIRED_PAGES; the card has room for 64."""
    ib_symbol_errors_per_hour: float = 120.0
    """About what the InfiniBand architecture's bit error rate of 1e-12 is on 32 Gbit/s (four lanes of QDR); faster links correct errors."""
    ib_port_errors_per_hour: float = 120.0
    """Packets received broken and the like: each symbol error may break one (ours)."""
    nic_errors_per_minute: float = 10.0
    """Frames received broken (ours): with forward error correction a good link has none."""
    disk_free: float = 0.05
    """Share of space and of inodes (ours; the kubelet's default evictions are at 10 % of space and 5 % of inodes)."""
    disk_seconds: float = 0.5
    """Mean time of a request between two readings (ours): a working disk needs milliseconds, a loaded one tens of them."""
    disk_requests: int = 100
    """Minimum number of requests to assess a disk's speed (ours)."""
    memory_available: float = 0.02
    """Minimum share of memory available without swapping (ours)."""
    memory_stalled: float = 60.0
    """Percent of a minute in which all work stalled for lack of memory; systemd-oomd's DefaultMemoryPressureLimit."""
    memory_errors_per_hour: float = 100.0
    """Corrected errors of the host's memory (ours); single ones are what ECC is for."""
    throttles_per_minute: float = 10.0
    """Thermal throttling events of processors (ours)."""
    load: float = 4.0
    """Runnable processes per processor (ours): data loaders may use two or three."""
    files_open: float = 0.95
    """Share of the kernel's limit of open files (ours)."""
    clock_offset: float = 0.5
    """Seconds (ours): beyond it, log lines of two nodes cannot be ordered as cause and effect."""
    recent: float = 3600.0
    """Seconds for which a kernel log line counts as new if there is no earlier reading (ours)."""


THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFinding:
    """A fault kind seen on a part of a node."""

    kind: str
    part: str
    """A GPU, an interface, a mount; equal in consecutive readings."""
    quote: str
    at: float | None = None
    """When it began (seconds since 1970), if the evidence says so."""
    source: str = ""
    """Who reported it, if that is not the instrument that its part of a reading comes from."""

    @property
    def is_proof(self) -> bool:
        """Whether its line can only mean this fault; an event may be of anybody."""
        return self.source != NODE_EVENTS and CATALOGUE[self.kind].proves(self.quote)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPair(Generic[P]):
    """The reading of one part of a node, and the previous one if there is any."""

    now: P
    before: P | None = None
    seconds: float = 0.0
    """Seconds between the two."""
    limits: Thresholds

    def rate(self, growth: int, unit: float) -> float:
        """Return the growth of a counter per *unit* seconds. A shorter interval counts as one unit, as a few errors are no rate."""
        return growth * unit / max(self.seconds, unit)


def grown(before: int | Unknown | None, now: int | Unknown) -> int | None:
    """Return the growth of a counter; None if a reading lacks it. A smaller value means that the counter restarted."""
    if before is None or isinstance(before, Unknown) or isinstance(now, Unknown):
        return None
    return now - before if now >= before else now


def growths(before: Mapping[str, int] | Unknown | None, now: Mapping[str, int] | Unknown, names: Iterable[str]) -> dict[str, int]:
    """Return the counters of *names* that grew, with their growth."""
    if before is None or isinstance(before, Unknown) or isinstance(now, Unknown):
        return {}
    both = {name: grown(before[name], now[name]) for name in names if name in before and name in now}
    return {name: growth for name, growth in both.items() if growth}


def above(value: float | Unknown, limit: float) -> bool:
    """Return whether *value* is known and above *limit*."""
    return not isinstance(value, Unknown) and value > limit


def listed(counts: Mapping[str, int]) -> str:
    """Format the growth of counters."""
    return ", ".join(f"{name} +{growth}" for name, growth in counts.items())
