"""Faults of mounted file systems and disks."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from holdfast.detectors.catalogue import Attribution, RecommendedAction, fault_kind
from holdfast.detectors.evidence import Sample, Unknown
from holdfast.detectors.nodes.findings import FaultFinding, ReadingPair, grown, growths
from holdfast.detectors.nodes.readings import CounterGrowth, Disk, Mount, NodeReading, StorageReading
from holdfast.plurals import plural

_GB: Final = 10**9
_MOUNT: Final = Mount(
    path="/data",
    kind="ext4",
    source="/dev/nvme0n1p1",
    options=("rw", "relatime"),
    own_options=("rw",),
    size=4000 * _GB,
    free=900 * _GB,
    inodes=1000,
    inodes_free=800,
    errors=0,
)
_DISK: Final = Disk(name="nvme0n1", read_only=False, counters={"reads": 1000, "read_ms": 2000, "writes": 1000, "write_ms": 3000})


def _look(at: float = 0.0, disk: Disk = _DISK, **facts: Any) -> NodeReading:  # noqa: ANN401 (fields of a Mount)
    reading = StorageReading(mounts=(dataclasses.replace(_MOUNT, **facts),), disks=(disk,))
    return NodeReading(node="n0", at=at, storage=reading)


def _minute_later(writes: int, write_ms: int) -> Sample:
    disk = dataclasses.replace(_DISK, counters={"reads": 1000, "read_ms": 2000, "writes": writes, "write_ms": write_ms})
    return Sample(CounterGrowth(before=_look(), now=_look(60.0, disk)))


_define = partial(
    fault_kind,
    component="storage",
    source="mounts and disks",
    attributed_to=Attribution.STORAGE,
    recommended_action=RecommendedAction.MONITOR,
    weight=57,
)

FULL: Final = _define(
    id="disk-full",
    title="A file system has almost no space or inodes left",
    action="free space; lower `checkpoint.keep` where it holds checkpoints",
    reference="https://man7.org/linux/man-pages/man3/statvfs.3.html",
    unhealthy=Sample(_look(free=100 * _GB)),
    healthy=Sample(_look(free=0, inodes=0, inodes_free=0, options=("ro",), own_options=("ro",))),
)
READ_ONLY: Final = _define(
    id="filesystem-read-only",
    title="A file system became read-only",
    recommended_action=RecommendedAction.DRAIN,
    action="see the kernel log for the damage; check the file system, then remount it",
    reference="https://man7.org/linux/man-pages/man5/ext4.5.html",
    unhealthy=Sample(_look(own_options=("ro", "errors=remount-ro"))),
    healthy=Sample(_look(options=("ro",), own_options=("ro",))),
)
BROKEN: Final = _define(
    id="filesystem-unreachable",
    title="A mounted file system is inaccessible",
    action="remount it; check its server or its disk",
    reference="https://man7.org/linux/man-pages/man3/errno.3.html",
    unhealthy=Sample(_look(failed=116, size=Unknown("Stale file handle"), free=Unknown("Stale file handle"))),
    healthy=Sample(_look(size=Unknown("no answer within 10 s"), free=Unknown("no answer within 10 s"))),
)
IO_ERRORS: Final = _define(
    id="io-errors",
    title="A disk or file system has uncorrectable errors",
    source="kernel log, ext4's error counter",
    action="back it up, check the disk (`smartctl -a`) and replace it",
    reference="https://docs.kernel.org/admin-guide/ext4.html",
    unhealthy=Sample(_look(errors=2)),
    healthy=Sample(_look(errors=0)),
)
SLOW: Final = _define(
    id="disk-slow",
    title="A disk has a very high latency",
    action="find what keeps it busy; check the disk",
    reference="https://docs.kernel.org/block/stat.html",
    unhealthy=_minute_later(writes=1200, write_ms=203_000),
    healthy=_minute_later(writes=1200, write_ms=4000),
)

NO_WRITES: Final = frozenset({"ro", "emergency_ro", "shutdown"})
"""Options of a file system that became read-only; ext4 has its own option for that since Linux 6.15."""
KERNEL_LINE: Final = re.compile(
    r"(?:critical (?:medium|target) error|I/O error), dev (?P<a>[\w-]+)|Buffer I/O error on dev (?P<b>[\w-]+)"
    r"|EXT4-fs error \(device (?P<c>[\w-]+)\)"
    r"|XFS \((?P<d>[\w-]+)\): .*(?:corruption|I/O error|log I/O error)|BTRFS (?:error|critical) \(device (?P<e>[\w-]+)"
)
"""Messages of the kernel's block layer and file systems about errors that reach the reader or writer."""


def judge_storage(pair: ReadingPair[StorageReading]) -> Iterator[FaultFinding]:
    """Yield faults of a node's file systems and disks."""
    before = pair.before
    if not isinstance(pair.now.mounts, Unknown):
        old_mounts = {} if before is None or isinstance(before.mounts, Unknown) else {mount.path: mount for mount in before.mounts}
        for mount in pair.now.mounts:
            yield from _mount(ReadingPair(now=mount, before=old_mounts.get(mount.path), seconds=pair.seconds, limits=pair.limits))
    if not isinstance(pair.now.disks, Unknown) and before is not None and not isinstance(before.disks, Unknown):
        old_disks = {disk.name: disk for disk in before.disks}
        for disk in pair.now.disks:
            yield from _disk(ReadingPair(now=disk, before=old_disks.get(disk.name), seconds=pair.seconds, limits=pair.limits))


def _mount(pair: ReadingPair[Mount]) -> Iterator[FaultFinding]:
    mount, old = pair.now, pair.before
    if mount.failed:
        yield FaultFinding(kind=BROKEN.id, part=mount.path, quote=f"{mount.path}: {os.strerror(mount.failed)}")
    writable = "ro" not in mount.options
    shut = NO_WRITES & set(mount.own_options)
    if shut and (writable or (old is not None and not NO_WRITES & set(old.own_options))):
        yield FaultFinding(kind=READ_ONLY.id, part=mount.path, quote=f"{mount.path} ({mount.source}): read-only, and was not to be")
    elif writable:
        yield from _space(mount, pair.limits.disk_free)
    known = old.errors if old is not None and not isinstance(old.errors, Unknown) else 0
    if more := grown(known, mount.errors):
        yield FaultFinding(
            kind=IO_ERRORS.id, part=mount.path, quote=f"{mount.path} ({mount.source}): {plural(more, 'error')} of the file system"
        )


def _space(mount: Mount, least: float) -> Iterator[FaultFinding]:
    for free, whole, words in ((mount.free, mount.size, "space"), (mount.inodes_free, mount.inodes, "inodes")):
        if not isinstance(free, Unknown) and not isinstance(whole, Unknown) and whole and free < whole * least:
            yield FaultFinding(kind=FULL.id, part=mount.path, quote=f"{mount.path}: {free / whole:.1%} of its {words} left")


def _disk(pair: ReadingPair[Disk]) -> Iterator[FaultFinding]:
    if pair.before is None:
        return
    more = growths(pair.before.counters, pair.now.counters, ("reads", "writes", "read_ms", "write_ms"))
    requests = more.get("reads", 0) + more.get("writes", 0)
    mean = (more.get("read_ms", 0) + more.get("write_ms", 0)) / 1000 / max(requests, 1)
    if requests >= pair.limits.disk_requests and mean > pair.limits.disk_seconds:
        quote = f"{pair.now.name}: {mean:.2f} s for each of {requests} requests"
        yield FaultFinding(kind=SLOW.id, part=pair.now.name, quote=quote)
