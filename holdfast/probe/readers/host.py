"""Read processors, memory, clock and uptime of a node, from /proc, /sys and `adjtimex`."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Final

from holdfast.detectors.evidence import Number, Unknown
from holdfast.detectors.nodes.readings import ClockReading, HostReading, Pressure
from holdfast.probe.readers import files

CLOCKS: Final = "sys/devices/system/clocksource/clocksource0"
UNSYNCHRONIZED: Final = 0x0040
NANOSECONDS: Final = 0x2000
"""Bits of the status of adjtimex: nothing synchronizes the clock; its offset is in nanoseconds rather than microseconds."""
_AVERAGE: Final = re.compile(r"^(some|full) .*avg60=([\d.]+)", re.MULTILINE)


class _Timex(ctypes.Structure):
    """`struct timex` of 64-bit Linux, with spare room after the fields that are read; see adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("worst", ctypes.c_long),
        ("estimated", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 64),
    )


def read_clock() -> ClockReading | Unknown:
    """Return whether this node's clock is synchronized, and its possible error. The clock is read, never set."""
    asked = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(asked)) < 0:
        return Unknown(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    status = int(asked.status)
    return ClockReading(
        synchronized=not status & UNSYNCHRONIZED, offset=asked.offset / (1e9 if status & NANOSECONDS else 1e6), worst=asked.worst / 1e6
    )


def read_host(root: Path = Path("/")) -> HostReading:
    """Return the state of a node's processors, memory and clock source."""
    clocks, open_files = files.text(root / CLOCKS / "available_clocksource"), root / "proc/sys/fs/file-nr"
    return HostReading(
        boot=files.text(root / "proc/sys/kernel/random/boot_id"),
        uptime=files.parsed(root / "proc/uptime", lambda found: float(found.split()[0]), "number"),
        processors=files.parsed(root / "sys/devices/system/cpu/online", _count_processors, "list of processors"),
        load_5m=files.parsed(root / "proc/loadavg", lambda found: float(found.split()[1]), "load"),
        memory_total=_named(root / "proc/meminfo", "MemTotal:", 1024),
        memory_available=_named(root / "proc/meminfo", "MemAvailable:", 1024),
        memory_pressure=files.parsed(root / "proc/pressure/memory", _pressure, "pressure"),
        oom_kills=_named(root / "proc/vmstat", "oom_kill"),
        memory_errors_corrected=_sum(root / "sys/devices/system/edac/mc", "mc*/ce_count"),
        memory_errors_uncorrected=_sum(root / "sys/devices/system/edac/mc", "mc*/ue_count"),
        throttled=_sum(root / "sys/devices/system/cpu", "cpu[0-9]*/thermal_throttle/*_throttle_count"),
        clock_source=files.text(root / CLOCKS / "current_clocksource"),
        clock_sources=clocks if isinstance(clocks, Unknown) else tuple(clocks.split()),
        files_open=files.parsed(open_files, lambda found: int(found.split()[0]), "number"),
        files_most=files.parsed(open_files, lambda found: int(found.split()[2]), "number"),
    )


def _named(path: Path, name: str, unit: int = 1) -> Number:
    """Return the number after *name* at the start of a line, times *unit*."""
    found = files.text(path)
    if isinstance(found, Unknown):
        return found
    for line in found.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return Unknown(f"{path}: has no {name.rstrip(':')}")


def _count_processors(found: str) -> int:
    """Count a list such as ``0-3,8``."""
    spans = [span.partition("-") for span in found.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def _pressure(found: str) -> Pressure:
    shares = {name: float(share) for name, share in _AVERAGE.findall(found)}
    return Pressure(some_60s=shares["some"], full_60s=shares.get("full", 0.0))


def _sum(place: Path, pattern: str) -> Number:
    """Return the sum of the numbers in all files below *place* that match *pattern*; `Unknown` where there is none."""
    numbers = [value for path in place.glob(pattern) if not isinstance(value := files.number(path), Unknown)]
    return sum(numbers) if numbers else Unknown(f"{place}: no counter can be read")
