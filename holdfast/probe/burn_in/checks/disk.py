"""Write a file, flush it to the disk, and read it back: each block carries its number, and its checksum is known."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark

NAME: Final = "disk"
BLOCK: Final = 4 << 20
MB: Final = 1e6
BUS: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A PCI address, as a folder of sysfs."""
MAX_SHARE: Final = 0.5
"""Share of the free space that a test may use: who works on the node may need the rest."""
NOT_THE_DISKS: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR})
"""Errors that mean a wrong folder in the cluster file, and are no fault of a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file, and the content that it must have."""

    path: Path
    sums: tuple[bytes, ...]
    """Checksum of each block."""
    seconds: float


def disk(folder: str, size: int, *, seconds: float) -> Check:
    """Write *size* bytes below *folder*, or as much as *seconds* leave time for, and read them back."""
    begun = time.monotonic()
    place = Path(folder).expanduser()
    try:
        free = shutil.disk_usage(place).free
        blocks = int(min(size, free * MAX_SHARE)) // BLOCK
        if not blocks:
            words = f"{place} has {free / MB:.0f} MB free, and {BLOCK / MB / MAX_SHARE:.0f} MB are the minimum for a test"
            return Check(name=NAME, mark=CheckMark.FAILED, words=words, seconds=time.monotonic() - begun)
        with tempfile.TemporaryDirectory(prefix="holdfast-burn-in-", dir=place) as scratch:
            written = write(Path(scratch) / "blocks", blocks, until=begun + seconds)
            return replace(verified(written, begun, free), devices=devices_of(place))
    except OSError as error:
        mark = CheckMark.SKIPPED if error.errno in NOT_THE_DISKS else CheckMark.FAILED
        words = f"{error.filename or place}: {error.strerror or error}"
        return Check(name=NAME, mark=mark, words=words, seconds=time.monotonic() - begun)


def devices_of(folder: Path) -> tuple[str, ...]:
    """Return the node's names of the file system that holds *folder*: its mount point, and the disks and partitions below it."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        rows = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    except OSError:
        rows = []
    mounts = [row[4] for row in rows if row[2] == device and folder.resolve().is_relative_to(row[4])]
    return tuple(dict.fromkeys([*sorted(mounts, key=len)[-1:], *_disks(Path("/sys/dev/block") / device)]))


def _disks(device: Path) -> list[str]:
    """Return a block device, the disk that it is a partition of, its PCI address, and its members (RAID, LVM)."""
    if not device.exists():
        return []  # no block device: an overlay, a network file system
    place = device.resolve()
    members = [name for member in sorted(place.glob("slaves/*")) for name in _disks(member)]
    parent = [place.parent.name] if (place / "partition").exists() else []
    return [place.name, *parent, *[part for part in place.parts if BUS.fullmatch(part)][-1:], *members]


def write(path: Path, blocks: int, *, until: float) -> Written:
    """Write that many blocks, at least one and none after *until* (monotonic), and flush them to the disk."""
    begun, body, sums = time.monotonic(), os.urandom(BLOCK - 8), []
    with path.open("wb", buffering=0) as file:
        for number in range(blocks):
            block = number.to_bytes(8, "little") + body
            sums.append(hashlib.blake2b(block, digest_size=16).digest())
            file.write(block)
            if time.monotonic() > until:
                break
        os.fsync(file.fileno())
        with suppress(OSError):  # without it the file is read from memory, and the disk's content is not checked
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return Written(path=path, sums=tuple(sums), seconds=time.monotonic() - begun)


def verified(written: Written, begun: float, free: int) -> Check:
    """Read back what was *written*; return the check."""
    read_from = time.monotonic()
    wrong = read_back(written)
    size, read_seconds = len(written.sums) * BLOCK, time.monotonic() - read_from
    figures = {
        "written MB/s": size / MB / max(written.seconds, 1e-6),
        "read MB/s": size / MB / max(read_seconds, 1e-6),
        "MB": size / MB,
        "free MB": free / MB,
    }
    mark, words = (CheckMark.FAILED, wrong) if wrong else (CheckMark.PASSED, "every block was read as it was written")
    return Check(name=NAME, mark=mark, words=words, figures=figures, seconds=time.monotonic() - begun)


def read_back(written: Written) -> str:
    """Return what is wrong with the file, or nothing."""
    with written.path.open("rb", buffering=0) as file:
        for number, wanted in enumerate(written.sums):
            block = file.read(BLOCK)
            if len(block) != BLOCK:
                return f"block {number} of {len(written.sums)} ends after {len(block)} bytes"
            if hashlib.blake2b(block, digest_size=16).digest() != wanted:
                return f"block {number} of {len(written.sums)} has another checksum than when it was written"
    return ""
