"""Processors, memory, clock and life of a node, from /proc and /sys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from detectors.evidence import Number, Unknown
from detectors.readings import HostReading, Pressure
from holdfast.probe.readers import files

CLOCKS: Final = "sys/devices/system/clocksource/clocksource0"

_AVERAGE: Final = re.compile(r"^(some|full) .*avg60=([\d.]+)", re.MULTILINE)


def read_host(root: Path = Path("/")) -> HostReading:
    """Return how a node is."""
    clocks = files.text(root / CLOCKS / "available_clocksource")
    return HostReading(
        boot=files.text(root / "proc/sys/kernel/random/boot_id"),
        uptime=_real(root / "proc/uptime", 0),
        processors=_processors(root),
        load_5m=_real(root / "proc/loadavg", 1),
        memory_total=_named(root / "proc/meminfo", "MemTotal:", 1024),
        memory_available=_named(root / "proc/meminfo", "MemAvailable:", 1024),
        memory_pressure=_pressure(root / "proc/pressure/memory"),
        oom_kills=_named(root / "proc/vmstat", "oom_kill"),
        memory_errors_corrected=_sum(root / "sys/devices/system/edac/mc", "mc*/ce_count"),
        memory_errors_uncorrected=_sum(root / "sys/devices/system/edac/mc", "mc*/ue_count"),
        throttled=_sum(root / "sys/devices/system/cpu", "cpu[0-9]*/thermal_throttle/*_throttle_count"),
        clock_source=files.text(root / CLOCKS / "current_clocksource"),
        clock_sources=clocks if isinstance(clocks, Unknown) else tuple(clocks.split()),
        files_open=_column(root / "proc/sys/fs/file-nr", 0),
        files_most=_column(root / "proc/sys/fs/file-nr", 2),
    )


def _word(path: Path, number: int) -> str | Unknown:
    found = files.text(path)
    if isinstance(found, Unknown):
        return found
    words = found.split()
    return words[number] if number < len(words) else Unknown(f"{path}: too short")


def _real(path: Path, number: int) -> float | Unknown:
    """Return the word *number* of a file as a number with a fraction."""
    word = _word(path, number)
    try:
        return word if isinstance(word, Unknown) else float(word)
    except ValueError:
        return Unknown(f"{path}: {str(word)[:40]!r} is no number")


def _column(path: Path, number: int) -> Number:
    word = _word(path, number)
    if isinstance(word, Unknown):
        return word
    return int(word) if word.isdigit() else Unknown(f"{path}: {word[:40]!r} is no number")


def _named(path: Path, name: str, unit: int = 1) -> Number:
    """Return the number behind *name* at the begin of a line, in units of *unit*."""
    found = files.text(path)
    if isinstance(found, Unknown):
        return found
    for line in found.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return Unknown(f"{path}: has no {name.rstrip(':')}")


def _processors(root: Path) -> Number:
    found = files.text(root / "sys/devices/system/cpu/online")
    if isinstance(found, Unknown):
        return found
    try:
        spans = [span.partition("-") for span in found.split(",")]
        return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    except ValueError:
        return Unknown(f"{root / 'sys/devices/system/cpu/online'}: {found[:40]!r} is no list of processors")


def _pressure(path: Path) -> Pressure | Unknown:
    found = files.text(path)
    if isinstance(found, Unknown):
        return found
    shares = {word: float(share) for word, share in _AVERAGE.findall(found)}
    if "some" not in shares:
        return Unknown(f"{path}: {found[:40]!r} is no pressure")
    return Pressure(some_60s=shares["some"], full_60s=shares.get("full", 0.0))


def _sum(place: Path, pattern: str) -> Number:
    """Return the sum of all files below *place* that *pattern* names; Blind where there is none to read."""
    numbers = [value for path in place.glob(pattern) if not isinstance(value := files.number(path), Unknown)]
    return sum(numbers) if numbers else Unknown(f"{place}: nothing counts there")
