"""Read mounted file systems and disks. Each mount is read by itself: one that hangs does not affect the others."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from pathlib import Path
from typing import Final

from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.readings import Counters, Disk, Mount
from holdfast.probe.readers import files

NO_FILES: Final = frozenset(
    "autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fuse.gvfsd-fuse fuse.lxcfs fusectl hugetlbfs iso9660 "  # noqa: SIM905 (a list takes a line each)
    "mqueue nsfs proc pstore ramfs rpc_pipefs securityfs selinuxfs squashfs sysfs tracefs".split()
)
"""File systems without files of ours: views of the kernel, and images, which are always full and read-only."""
NO_DISKS: Final = re.compile(r"(loop|ram|zram|sr|fd|dm-|md)\d*")
"""Block devices without hardware of their own."""
BROKEN: Final = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ESHUTDOWN})
"""Errors of a file system that has failed; others mean that it is forbidden, or was removed meanwhile."""


def mounted(root: Path = Path("/")) -> tuple[Mount, ...] | Unknown:
    """Return what is mounted, each file system once, without touching any of it."""
    visible = all_mounted(root)
    if isinstance(visible, Unknown):
        return visible
    found: dict[str, Mount] = {}
    for device, mount in visible:
        if mount.kind not in NO_FILES:
            found.setdefault(device, mount)
    return tuple(found.values())


def all_mounted(root: Path = Path("/")) -> tuple[tuple[str, Mount], ...] | Unknown:
    """Return everything that is mounted, with its device number, without touching any of it."""
    table = files.text(root / "proc/self/mountinfo")
    if isinstance(table, Unknown):
        return table
    visible = {mount.path: (device, mount) for device, mount in map(_mount, table.splitlines())}  # a later mount hides an earlier one
    return tuple(visible.values())


def _mount(line: str) -> tuple[str, Mount]:
    """Return the device number and the mount of one line; see proc_pid_mountinfo(5)."""
    mine, _, theirs = line.partition(" - ")
    _id, _parent, device, _root, path, options = mine.split(" ")[:6]
    kind, source, own_options = [*theirs.split(" "), "", ""][:3]
    return device, Mount(
        path=_unescaped(path),
        kind=kind,
        source=_unescaped(source),
        options=tuple(options.split(",")),
        own_options=tuple(own_options.split(",")),
    )


def _unescaped(text: str) -> str:
    r"""Replace the kernel's escapes of blanks: `\040` and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def with_space(mount: Mount, root: Path = Path("/")) -> Mount:
    """Return *mount* with its size and free space; this is the call that a dead server blocks."""
    errors = files.number(root / "sys/fs/ext4" / Path(mount.source).name / "errors_count") if mount.kind == "ext4" else NOT_REQUESTED
    try:
        space = os.statvfs(root / mount.path.lstrip("/"))
    except OSError as error:
        failed = error.errno if error.errno in BROKEN else 0
        return dataclasses.replace(without_space(mount, f"{mount.path}: {error.strerror or error}"), errors=errors, failed=failed or 0)
    return dataclasses.replace(
        mount,
        size=space.f_blocks * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
        inodes=space.f_files,
        inodes_free=space.f_favail,
        errors=errors,
    )


def without_space(mount: Mount, why: str) -> Mount:
    """Return *mount* with unknown size and free space."""
    unknown = Unknown(why)
    return dataclasses.replace(mount, size=unknown, free=unknown, inodes=unknown, inodes_free=unknown)


def read_disks(root: Path = Path("/")) -> tuple[Disk, ...] | Unknown:
    """Return all disks."""
    found = files.entries(root / "sys/block")
    if isinstance(found, Unknown):
        return found
    return tuple(
        Disk(name=disk.name, read_only=files.flag(disk / "ro"), counters=files.parsed(disk / "stat", _requests, "statistics"))
        for disk in found
        if not NO_DISKS.fullmatch(disk.name)
    )


def _requests(found: str) -> Counters:
    """Return the request counters of a disk; format: https://docs.kernel.org/block/stat.html ."""
    reads, _, _, read_ms, writes, _, _, write_ms = map(int, found.split()[:8])
    return {"reads": reads, "read_ms": read_ms, "writes": writes, "write_ms": write_ms}
