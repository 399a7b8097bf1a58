"""Write patterns to all of a memory region, read them back, and invert them; bounded by the free memory.

Words that hold their own address find shorted address lines, and their inverse and the constant patterns find stuck bits. Each pattern is
written to the complete region before it is read, so that the reads come from memory and not from a cache.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.plurals import plural
from holdfast.probe.burn_in.checks.core_pool import CoreEnded, judged, on_each, processors

NAME: Final = "memory"
BLOCK: Final = 1 << 20
"""Bytes that are written or compared at once."""
SAMPLE: Final = 8 << 20
"""Bytes with which the speed of this node is measured."""
WORD: Final = 8
MIB: Final = 1 << 20
INVERSE: Final = bytes(255 - byte for byte in range(256))
_OFFSETS: Final = int.from_bytes(b"".join(offset.to_bytes(WORD, "little") for offset in range(0, BLOCK, WORD)), "little")
_ONES: Final = int.from_bytes((1).to_bytes(WORD, "little") * (BLOCK // WORD), "little")

Pattern = Callable[[int], bytes]
"""From a block's offset to its content."""


def _addresses(offset: int) -> bytes:
    """Return words that each hold their own offset in the region."""
    return (_OFFSETS + offset * _ONES).to_bytes(BLOCK, "little")


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
    """Fill *share* of the free memory with every pattern: at most *most* bytes, and no more than *seconds* leave time for."""
    begun, cores = time.monotonic(), processors()
    free = free_bytes(Path("/"))
    size = int(min(free * share, most)) // len(cores) // BLOCK * BLOCK
    if size < BLOCK:
        words = f"too little is free: {free // MIB} MiB, and a share of {share:g} of it leaves nothing for {plural(len(cores), 'core')}"
        return Check(name=NAME, mark=CheckMark.SKIPPED, words=words, seconds=time.monotonic() - begun)
    found = on_each(cores, lambda index: _test(size, begun + seconds, index * size))
    spent = time.monotonic() - begun
    answers = [one for one in found.values() if not isinstance(one, CoreEnded)]
    tested, moved = sum(one["size"] for one in answers), sum(one["bytes"] for one in answers)
    patterns = float(min([one["patterns"] for one in answers], default=0))
    figures = {"MiB": tested / MIB, "patterns": patterns, "MB/s": moved / 1e6 / max(spent, 1e-6)}
    return judged(NAME, found, figures, fine="every byte was read as it was written", seconds=spent)


def _test(size: int, until: float, base: int) -> dict[str, Any]:
    """Test *size* bytes, or as many as the first two patterns can cover by *until*, which a small sample shows."""
    sample = min(SAMPLE, size)
    begun = time.monotonic()
    with mmap.mmap(-1, sample) as region:
        march(region, 0.0)
    now = time.monotonic()
    possible = int(sample * max(0.0, until - now) / (2 * max(now - begun, 1e-6)))
    with mmap.mmap(-1, max(sample, min(size, possible // BLOCK * BLOCK))) as region:
        return {**march(region, until, base), "size": len(region)}


def march(region: mmap.mmap | bytearray, until: float, base: int = 0) -> dict[str, Any]:
    """Write each pattern to *region* and read it back, in turn until *until* (monotonic); stop at the first wrong byte."""
    moved = patterns = 0
    while True:
        for name, pattern in PATTERNS.items():
            for offset in range(0, len(region), BLOCK):
                region[offset : offset + BLOCK] = pattern(base + offset)
            for offset in range(0, len(region), BLOCK):
                wanted = pattern(base + offset)
                if region[offset : offset + BLOCK] != wanted:
                    return {"patterns": patterns, "bytes": moved, "wrong": _difference(name, offset, wanted, region)}
            moved += 2 * len(region)
            patterns += 1
            if time.monotonic() >= until:
                return {"patterns": patterns, "bytes": moved, "wrong": ""}


def _difference(name: str, offset: int, wanted: bytes, region: mmap.mmap | bytearray) -> str:
    read = bytes(region[offset : offset + BLOCK])
    first = next((place for place in range(BLOCK) if read[place] != wanted[place]), None)
    if first is None:
        return f"pattern {name}: a block at {offset:#x} was read wrong once, and correctly after that"
    return f"pattern {name}: {read[first]:#04x} was read at {offset + first:#x}, and {wanted[first]:#04x} was written"


def free_bytes(root: Path) -> int:
    """Return the bytes of memory that may be used: the kernel's available memory, or the rest of this container's limit, if less."""
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
