"""What judges of readings share: a sighting is a kind of fault on a part of a node, and counters are compared between two looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from detectors.evidence import Unknown

P = TypeVar("P")

SECOND: Final = 1.0
MINUTE: Final = 60.0
HOUR: Final = 3600.0
"""Units of rates, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits of what a healthy node shows."""

    pcie_replays_per_minute: float = 8.0
    """DCGM, dcgm_gpu_hardware_limits.h: "8 replays per minute is the maximum recommended by RM"."""
    nvlink_errors: int = 1
    """Replays or recoveries; DCGM, DCGM_LIMIT_MAX_NVLINK_ERROR."""
    nvlink_crc_per_second: float = 100.0
    """DCGM, DCGM_LIMIT_MAX_NVLINK_CRC_ERROR: "CRC errors only matter at rates of 100+ per second"."""
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
    """Mean time of a request over the time between two looks (ours): a working disk needs milliseconds, a loaded one tens of them."""
    disk_requests: int = 100
    """Fewer say nothing about a disk's speed (ours)."""
    memory_available: float = 0.02
    """Share of memory that can still be had without swapping (ours)."""
    memory_stalled: float = 60.0
    """Percent of a minute in which nobody could work for want of memory; systemd-oomd's DefaultMemoryPressureLimit."""
    memory_errors_per_hour: float = 100.0
    """Corrected errors of the host's memory (ours); single ones are what ECC is for."""
    throttles_per_minute: float = 10.0
    """Slow-downs of processors for heat (ours)."""
    load: float = 4.0
    """Processes that want a processor, for each there is (ours): data loaders may want two or three."""
    files_open: float = 0.95
    """Share of all files that the kernel would open (ours)."""
    clock_offset: float = 0.5
    """Seconds (ours): lines of logs of two nodes can no longer be put in order of cause and effect."""
    recent: float = 3600.0
    """Seconds for which a line of the kernel's log speaks of now, where no earlier look says what is new (ours)."""


THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFinding:
    """A kind of fault seen on a part of a node."""

    kind: str
    part: str
    """A GPU, an interface, a mount: what does not change between two looks."""
    quote: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPair(Generic[P]):
    """One part of a node now, and as it was before where that is known and still counts."""

    now: P
    before: P | None = None
    seconds: float = 0.0
    """Between the two."""
    limits: Thresholds

    def rate(self, growth: int, unit: float) -> float:
        """Return by how much a counter grew in *unit* seconds. Of a shorter time all is counted, as a few errors at once make no rate."""
        return growth * unit / max(self.seconds, unit)


def grown(before: int | Unknown | None, now: int | Unknown) -> int | None:
    """Return by how much a counter grew; None where one of both looks did not see it. One that is smaller now began anew."""
    if before is None or isinstance(before, Unknown) or isinstance(now, Unknown):
        return None
    return now - before if now >= before else now


def growths(before: Mapping[str, int] | Unknown | None, now: Mapping[str, int] | Unknown, names: Iterable[str]) -> dict[str, int]:
    """Return the counters of *names* that grew, and by how much."""
    if before is None or isinstance(before, Unknown) or isinstance(now, Unknown):
        return {}
    both = {name: grown(before[name], now[name]) for name in names if name in before and name in now}
    return {name: growth for name, growth in both.items() if growth}


def above(value: float | Unknown, limit: float) -> bool:
    """Say whether *value* is known and above *limit*."""
    return not isinstance(value, Unknown) and value > limit


def listed(counts: Mapping[str, int]) -> str:
    """Return counters in words."""
    return ", ".join(f"{name} +{growth}" for name, growth in counts.items())
