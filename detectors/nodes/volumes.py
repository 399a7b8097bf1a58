"""What the kernel itself says of a disk or a file system that a line of its log names: it may contradict the line, agree, or see it unused.

A disk that no rank uses fails beside a hang that it has nothing to do with, and syslog may repeat an old line. What cannot be measured says
nothing of the line. Nothing here touches a disk: mount table, state and counters are the kernel's.
State and counters: https://docs.kernel.org/block/stat.html, https://docs.kernel.org/scsi/scsi_mid_low_api.html,
https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from holdfast.detectors.associations import belongs
from holdfast.detectors.evidence import Number, Unknown
from holdfast.detectors.nodes import storage
from holdfast.detectors.nodes.line_check import LineCheck
from holdfast.detectors.nodes.readings import Mount

GIVEN_UP: Final = "nvme-gone"
"""Kind of lines by which the driver has given an NVMe disk up."""
WORKING: Final = frozenset({"", "running", "created", "live", "new"})
"""States of a SCSI device and of an NVMe controller that can be used; empty where the driver keeps none."""
IDLE_SECONDS: Final = 10.0
"""Seconds without a request from which on a disk counts as one that is not in use."""
_FAILED_REQUEST: Final = re.compile(r"(?i)(?:error, dev (?P<a>sd[a-z]+)|Buffer I/O error on dev (?P<b>sd[a-z]+))\b")
"""A request that a SCSI disk failed, which its counter has counted."""
_NAME: Final = re.compile(r"[A-Za-z][\w-]*|(?<![\d:])(?:\d+:\d+:\d+:\d+(?!\d)|\d+:\d+(?!:?\d))")
_DISK_NAME: Final = re.compile(r"sd[a-z]{1,3}\d*|vd[a-z]\d*|nvme\d+(?:n\d+(?:p\d+)?)?|dm-\d+")
"""Names that only a disk has: one that the node does not have is a disk of another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A disk, a partition, a mapping or an array of them, or the controller of an NVMe disk."""

    name: str
    """`sda1`, `dm-0`, `nvme1`."""
    below: tuple[str, ...] = ()
    """What it is on: the disk of a partition, the members of an array, the controller of an NVMe disk."""
    aliases: tuple[str, ...] = ()
    """Other names of it in lines: its number (`8:1`), its SCSI address (`2:0:0:0`), its SATA port (`ata2`)."""
    state: str | Unknown = ""
    """As its driver names it: `running`, `live`, `offline`, `dead`; empty where the driver keeps none."""
    failures: Number
    """How many requests it has failed; only SCSI counts them."""
    requests: Number
    """Requests that it has been sent since the machine started."""
    removable: bool = False
    """Its medium can be taken out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeReading:
    """All disks and mounts of a node, and which of them processes of the job use."""

    at: float
    """Seconds of a clock that all processes of the node share."""
    volumes: tuple[Volume, ...] | Unknown
    mounts: tuple[tuple[str, Mount], ...] | Unknown
    """Each mount with the name of its volume; that is empty for one that is on none."""
    used: tuple[str, ...] | Unknown
    """Mounts and volumes in which a process of the job has something open or mapped, or that its command or environment names."""
    answers: dict[str, bool]
    """Mounts of an NFS server that were asked for their free space, and whether they answered."""


def is_about_volume(kind: str) -> bool:
    """Return whether a line of *kind* is about a disk, a file system or its server."""
    return belongs(kind, "storage-broken")


def with_earlier_use(reading: VolumeReading, earlier: VolumeReading) -> VolumeReading:
    """Return *reading* with what was used in the *earlier* one too: a file that was read is closed again."""
    if isinstance(reading.used, Unknown) or isinstance(earlier.used, Unknown):
        return replace(reading, used=reading.used if isinstance(reading.used, Unknown) else earlier.used)
    return replace(reading, used=tuple(sorted({*reading.used, *earlier.used})))


def check_volume_line(kind: str, text: str, earlier: Sequence[VolumeReading], now: VolumeReading, seconds: float) -> LineCheck:
    """Return what *now*, read after the line *text*, says of the disks and file systems that it names.

    It is compared with the *earlier* readings, the first and the last one, which may be none; *seconds* lie between the last and *now*.
    """
    if earlier and (absent := _absent(text, [*earlier, now])):
        return LineCheck(contradicted=f"this node has no {absent}")
    if servers := _of_server(text, now):
        return replace(_with_answers(servers, now), unused=_is_unused((), servers, earlier, now))
    names = _named(text, now)
    old = _named(text, earlier[-1]) if earlier else set()
    if not names and not old:
        return LineCheck()
    unused = _is_unused(names | old, (), earlier, now)
    signs = _signs(names, old, earlier, now, seconds)
    if signs:
        return LineCheck(supported=", ".join(signs), unused=unused)
    return LineCheck(contradicted=_contradiction(kind, text, names, earlier, now, seconds), unused=unused)


def is_unused(part: str, earlier: Sequence[VolumeReading], now: VolumeReading) -> bool:
    """Return whether *part*, a mount or a disk on which a fault was measured, is one that no process of the job has used, for sure."""
    mounts = [path for path, _ in _mounts_by_path(now) if path == part]
    volumes = {volume for path, volume in _mounts_by_path(now) if path == part and volume} or _named(part, now)
    if mounts and not volumes and not _is_remote(part, now):
        return False
    return bool(mounts or volumes) and _is_unused(volumes, mounts, earlier, now)


# -- what a line names -------------------------------------------------------------------------------------------------


def _volumes(reading: VolumeReading) -> dict[str, Volume]:
    return {} if isinstance(reading.volumes, Unknown) else {one.name: one for one in reading.volumes}


def _mounts_by_path(reading: VolumeReading) -> list[tuple[str, str]]:
    return [] if isinstance(reading.mounts, Unknown) else [(mount.path, volume) for volume, mount in reading.mounts]


def _names_in(text: str) -> set[str]:
    """Return the words of *text* that may name a volume; the kernel calls the journal of `sdb1` `sdb1-8`."""
    words = _NAME.findall(text)
    return {*words, *(re.sub(r"-\d+$", "", word) for word in words)}


def _named(text: str, reading: VolumeReading) -> set[str]:
    words = _names_in(text)
    return {one.name for one in _volumes(reading).values() if words & {one.name, *one.aliases}}


def _absent(text: str, readings: Sequence[VolumeReading]) -> str:
    """Return the disk that *text* names and that the node never had in *readings*; empty if there is none, or if that is not known."""
    if any(not _volumes(one) for one in readings):
        return ""
    known = {name for one in readings for volume in _volumes(one).values() for name in (volume.name, *volume.aliases)}
    words = _names_in(text)
    return "" if words & known else min(filter(_DISK_NAME.fullmatch, words), default="")


def _on_top(names: Iterable[str], reading: VolumeReading) -> set[str]:
    """Return *names* and all volumes that are on them."""
    found = set(names)
    while more := {one.name for one in _volumes(reading).values() if found & set(one.below)} - found:
        found |= more
    return found


def _of_server(text: str, reading: VolumeReading) -> list[str]:
    """Return the mounts whose server *text* names."""
    mounts = [] if isinstance(reading.mounts, Unknown) else [mount for _, mount in reading.mounts]
    return [mount.path for mount in mounts if names_server(text, mount)]


def names_server(text: str, mount: Mount) -> bool:
    """Return whether *text* names the server of *mount*, or the service that its targets belong to: `fs1-OST0003` of Lustre's fs1."""
    if mount.source.startswith("/dev/"):
        return False
    host, separator, share = mount.source.partition(":/")
    if not separator:  # a Windows share
        host = mount.source[2:].partition("/")[0] if mount.source.startswith("//") else ""
    if mount.kind == "lustre" and share and re.search(rf"\b{re.escape(share.partition('/')[0])}-", text):
        return True
    return any(re.search(rf"(?<![\w.-]){re.escape(one)}(?![\w-]|\.\w)", text) for one in re.split(r"[,@\[\]]", host) if one)


def _is_remote(path: str, reading: VolumeReading) -> bool:
    mounts = () if isinstance(reading.mounts, Unknown) else reading.mounts
    sources = [mount.source for _, mount in mounts if mount.path == path and not mount.source.startswith("/dev/")]
    return any(":/" in source or source.startswith("//") for source in sources)


# -- what was measured of it -------------------------------------------------------------------------------------------


def _is_unused(names: Iterable[str], paths: Iterable[str], earlier: Sequence[VolumeReading], now: VolumeReading) -> bool:
    """Return whether the job has nothing on the volumes *names* and the mounts *paths* for sure.

    No process has, or had at a reading, anything open there or names it, and a disk was sent no request from the first reading to the last
    one before the line.
    """
    if not earlier or isinstance(now.mounts, Unknown) or isinstance(earlier[-1].mounts, Unknown):
        return False
    last = with_earlier_use(now, earlier[-1])
    if isinstance(last.used, Unknown):
        return False
    volumes = _on_top(names, now) | _on_top(names, earlier[-1])
    mounts = {path for reading in (earlier[-1], now) for path, volume in _mounts_by_path(reading) if volume in volumes}
    if (volumes | mounts | set(paths)) & set(last.used):
        return False
    return not volumes or _was_idle(volumes, earlier[0], earlier[-1])


def _was_idle(names: Iterable[str], first: VolumeReading, last: VolumeReading) -> bool:
    if last.at - first.at < IDLE_SECONDS:
        return False
    before, after = _volumes(first), _volumes(last)
    if not all(name in before and name in after for name in names):
        return False
    return all(not isinstance(old := before[name].requests, Unknown) and old == after[name].requests for name in names)


def _with_answers(paths: Sequence[str], now: VolumeReading) -> LineCheck:
    """Return what it means which of the mounts *paths* answered."""
    asked = {path: now.answers[path] for path in paths if path in now.answers}
    if silent := [path for path, answered in asked.items() if not answered]:
        return LineCheck(supported=f"{' and '.join(silent)} does not answer")
    return LineCheck(contradicted=f"{' and '.join(asked)} answers" if len(asked) == len(paths) else "")


def _signs(names: set[str], old: set[str], earlier: Sequence[VolumeReading], now: VolumeReading, seconds: float) -> list[str]:
    """Return what agrees with a line about the volumes *names*, *old* in the last of the *earlier* readings."""
    if not names and not isinstance(now.volumes, Unknown):
        return [f"{min(old)} is gone"]
    volumes, before = _volumes(now), _volumes(earlier[-1]) if earlier else {}
    places = sorted(_below(names, volumes))
    found = [f"{name} is {state}" for name in places if not isinstance(state := volumes[name].state, Unknown) and state not in WORKING]
    failed = {name: count for name in places if (count := _grown(before.get(name), volumes[name]))}
    found += [f"{name} failed {count} {'request' if count == 1 else 'requests'} in {seconds:.0f} s" for name, count in failed.items()]
    if earlier:
        was = {path: mount for path, mount in _mounts_on(names, earlier[-1]).items() if _is_writable(mount)}
        found += [f"{path} became read-only" for path, mount in _mounts_on(names, now).items() if path in was and not _is_writable(mount)]
    return found


def _contradiction(  # noqa: PLR0913, PLR0917 (what was said, and what is known)
    kind: str, text: str, names: set[str], earlier: Sequence[VolumeReading], now: VolumeReading, seconds: float
) -> str:
    volumes = _volumes(now)
    mounts = _mounts_on(names, now)
    if kind == storage.READ_ONLY.id and mounts and all(map(_is_writable, mounts.values())):
        return f"{' and '.join(mounts)} is mounted and writable"
    controllers = [name for name in sorted(_below(names, volumes)) if re.fullmatch(r"nvme\d+", name)]
    if kind == GIVEN_UP and controllers and all(volumes[name].state == "live" for name in controllers):
        return f"{' and '.join(controllers)} is live"
    if earlier and (said := _FAILED_REQUEST.search(text)):
        disk = volumes.get(said["a"] or said["b"])
        if disk is not None and disk.state == "running" and not disk.removable and _grown(_volumes(earlier[-1]).get(disk.name), disk) == 0:
            return f"by its counter {disk.name} failed no request in {seconds:.0f} s around the line, and it is running"
    return ""


def _below(names: Iterable[str], volumes: dict[str, Volume]) -> set[str]:
    """Return *names* and all that they are on."""
    found = {name for name in names if name in volumes}
    while more := {under for name in found for under in volumes[name].below if under in volumes} - found:
        found |= more
    return found


def _mounts_on(names: Iterable[str], reading: VolumeReading) -> dict[str, Mount]:
    """Return by path what is mounted from the volumes *names* themselves: what is on top of them may be an array that goes on without."""
    mounts = () if isinstance(reading.mounts, Unknown) else reading.mounts
    wanted = set(names)
    return {mount.path: mount for volume, mount in mounts if volume in wanted}


def _is_writable(mount: Mount) -> bool:
    return not storage.NO_WRITES & set(mount.own_options)


def _grown(before: Volume | None, now: Volume) -> int | None:
    """Return how many requests failed in between; None where that is not known: a smaller count means that it is another disk."""
    if before is None or isinstance(before.failures, Unknown) or isinstance(now.failures, Unknown) or now.failures < before.failures:
        return None
    return now.failures - before.failures
