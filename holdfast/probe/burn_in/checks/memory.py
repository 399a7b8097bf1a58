"""Patterns through memory: written over all of a region, read back, and turned over; bounded by what is free.

A word that holds its own address finds lines that answer for one another, its inverse and the constant patterns bits that stick. The region
is passed over whole between a write and its reading, so that what is read is what the memory has and not a cache.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from detectors.burn_in_results import Check, CheckMark
from holdfast.probe.burn_in.checks.core_pool import CoreEnded, judged, on_each, processors

NAME: Final = "memory"
BLOCK: Final = 1 << 20
"""Bytes that are written or compared at once."""
SAMPLE: Final = 8 << 20
"""Bytes by which it is found out how fast this node is."""
WORD: Final = 8
MIB: Final = 1 << 20
INVERSE: Final = bytes(255 - byte for byte in range(256))
_BASE: Final = int.from_bytes(b"".join(offset.to_bytes(WORD, "little") for offset in range(0, BLOCK, WORD)), "little")
_ONES: Final = int.from_bytes((1).to_bytes(WORD, "little") * (BLOCK // WORD), "little")

Pattern = Callable[[int], bytes]
"""From a block's offset to what it is to hold."""


def _addresses(offset: int) -> bytes:
    """Return words each of which holds its own offset in the region."""
    return (_BASE + offset * _ONES).to_bytes(BLOCK, "little")


def _constant(byte: int) -> Pattern:
    block = bytes([byte]) * BLOCK
    return lambda _offset: block


PATTERNS: Final[dict[str, Pattern]] = {
    "addresses": _addresses,
    "addresses inverted": lambda offset: _addresses(offset).translate(INVERSE),
    "0xAA": _constant(0xAA),
    "0x55": _constant(0x55),
    "0xFF": _constant(0xFF),
    "0x00": _constant(0x00),
}


def memory(seconds: float, share: float, most: int) -> Check:
    """Fill *share* of what is free with every pattern: *most* bytes at most, and what *seconds* leave time for."""
    begun, used = time.monotonic(), processors()
    free = free_bytes(Path("/"))
    size = int(min(free * share, most)) // len(used) // BLOCK * BLOCK
    if size < BLOCK:
        words = f"too little is free: {free // MIB} MiB, and a share of {share:g} of it leaves nothing for {len(used)} core(s)"
        return Check(name=NAME, mark=CheckMark.SKIPPED, words=words, seconds=time.monotonic() - begun)
    found = on_each(used, lambda place: _tried(size, begun + seconds, place * size))
    return _told(found, time.monotonic() - begun)


def _told(found: dict[int, dict[str, Any] | CoreEnded], spent: float) -> Check:
    answers = [one for one in found.values() if not isinstance(one, CoreEnded)]
    size, gone = sum(one["size"] for one in answers), sum(one["bytes"] for one in answers)
    patterns = float(min([one["patterns"] for one in answers], default=0))
    figures = {"MiB": size / MIB, "patterns": patterns, "MB/s": gone / 1e6 / max(spent, 1e-6)}
    return judged(NAME, found, figures, fine="every byte was read as it was written", seconds=spent)


def _tried(size: int, until: float, base: int) -> dict[str, Any]:
    with mmap.mmap(-1, _in_time(size, until)) as region:
        return {**march(region, until, base), "size": len(region)}


def _in_time(size: int, until: float) -> int:
    """Return how much of *size* can be passed over with the first two patterns by *until*, by how long a small part takes."""
    sample = min(SAMPLE, size)
    begun = time.monotonic()
    with mmap.mmap(-1, sample) as region:
        march(region, 0.0)
    now = time.monotonic()
    fits = sample * max(0.0, until - now) / (2 * max(now - begun, 1e-6))
    return max(sample, min(size, int(fits) // BLOCK * BLOCK))


def march(region: mmap.mmap | bytearray, until: float, base: int = 0) -> dict[str, Any]:
    """Write each pattern over *region* and read it back, in turn until it is *until* (monotonic); stop at the first wrong byte."""
    gone = patterns = 0
    while True:
        for name, pattern in PATTERNS.items():
            for offset in range(0, len(region), BLOCK):
                region[offset : offset + BLOCK] = pattern(base + offset)
            for offset in range(0, len(region), BLOCK):
                wanted = pattern(base + offset)
                if region[offset : offset + BLOCK] != wanted:
                    return {"patterns": patterns, "bytes": gone, "wrong": _difference(name, offset, wanted, region)}
            gone += 2 * len(region)
            patterns += 1
            if time.monotonic() >= until:
                return {"patterns": patterns, "bytes": gone, "wrong": ""}


def _difference(name: str, offset: int, wanted: bytes, region: mmap.mmap | bytearray) -> str:
    read = bytes(region[offset : offset + BLOCK])
    first = next((place for place in range(BLOCK) if read[place] != wanted[place]), None)
    if first is None:
        return f"pattern {name}: a block at {offset:#x} was read wrong once, and right after that"
    return f"pattern {name}: {read[first]:#04x} was read at {offset + first:#x}, and {wanted[first]:#04x} had been written"


def free_bytes(root: Path) -> int:
    """Return how much memory may be taken: what the kernel calls available, or what is left of this container's limit, if less."""
    found = [int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    limit = "".join(_lines(root / "sys/fs/cgroup/memory.max")).strip()
    taken = "".join(_lines(root / "sys/fs/cgroup/memory.current")).strip()
    if limit.isdigit() and taken.isdigit():
        found.append(max(0, int(limit) - int(taken)))
    return min(found, default=0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
