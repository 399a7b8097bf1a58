"""Mounted file systems and disks. Each mount is filled in on its own: one that hangs says nothing about the others."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from pathlib import Path
from typing import Final

from detectors.evidence import NOT_REQUESTED, Unknown
from detectors.readings import Counters, Disk, Mount
from holdfast.probe.readers import files

NO_FILES: Final = frozenset(
    {
        *(
            "autofs",
            "binfmt_misc",
            "bpf",
            "cgroup",
            "cgroup2",
            "configfs",
            "debugfs",
            "devpts",
            "devtmpfs",
            "efivarfs",
            "fusectl",
            "hugetlbfs",
        ),
        *("hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "ramfs", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs"),
        *("fuse.gvfsd-fuse", "fuse.lxcfs", "iso9660", "squashfs"),
    }
)
"""File systems that keep no files of ours: views of the kernel, and images that are full and read-only by nature."""
NO_DISKS: Final = re.compile(r"(loop|ram|zram|sr|fd|dm-|md)\d*")
"""Block devices without hardware of their own."""
BROKEN: Final = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ESHUTDOWN})
"""What a file system says of which nothing can be reached; forbidden or removed meanwhile are other matters."""


def mounted(root: Path = Path("/")) -> tuple[Mount, ...] | Unknown:
    """Return what is mounted, each file system once, without touching any of it."""
    table = files.text(root / "proc/self/mountinfo")
    if isinstance(table, Unknown):
        return table
    on_top = {mount.path: (device, mount) for device, mount in map(_mount, table.splitlines())}  # a later mount hides what lies below it
    found: dict[str, Mount] = {}
    for device, mount in on_top.values():
        if mount.kind not in NO_FILES:
            found.setdefault(device, mount)
    return tuple(found.values())


def _mount(line: str) -> tuple[str, Mount]:
    """Return the device number and the mount of one line; see proc_pid_mountinfo(5)."""
    mine, _, theirs = line.partition(" - ")
    _id, _parent, device, _root, path, options = mine.split(" ")[:6]
    kind, source, own_options = [*theirs.split(" "), "", ""][:3]
    return device, Mount(
        path=_plain(path), kind=kind, source=_plain(source), options=tuple(options.split(",")), own_options=tuple(own_options.split(","))
    )


def _plain(text: str) -> str:
    r"""Undo what the kernel does to blanks: `\040` and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def filled(mount: Mount, root: Path = Path("/")) -> Mount:
    """Return *mount* with its space; this is what a hung server makes wait."""
    errors = files.number(root / "sys/fs/ext4" / Path(mount.source).name / "errors_count") if mount.kind == "ext4" else NOT_REQUESTED
    try:
        told = os.statvfs(root / mount.path.lstrip("/"))
    except OSError as error:
        failed = error.errno if error.errno in BROKEN else 0
        return dataclasses.replace(emptied(mount, f"{mount.path}: {error.strerror or error}"), errors=errors, failed=failed or 0)
    return dataclasses.replace(
        mount,
        size=told.f_blocks * told.f_frsize,
        free=told.f_bavail * told.f_frsize,
        inodes=told.f_files,
        inodes_free=told.f_favail,
        errors=errors,
    )


def emptied(mount: Mount, why: str) -> Mount:
    """Return *mount* as one that could not be looked into."""
    dark = Unknown(why)
    return dataclasses.replace(mount, size=dark, free=dark, inodes=dark, inodes_free=dark)


def read_disks(root: Path = Path("/")) -> tuple[Disk, ...] | Unknown:
    """Return all disks."""
    found = files.entries(root / "sys/block")
    if isinstance(found, Unknown):
        return found
    return tuple(
        Disk(name=disk.name, read_only=files.flag(disk / "ro"), counters=_requests(disk / "stat"))
        for disk in found
        if not NO_DISKS.fullmatch(disk.name)
    )


def _requests(path: Path) -> Counters | Unknown:
    """Return what a disk has done; its form: https://docs.kernel.org/block/stat.html ."""
    found = files.text(path)
    if isinstance(found, Unknown):
        return found
    numbers = found.split()
    try:
        reads, _, _, read_ms, writes, _, _, write_ms = map(int, numbers[:8])
    except ValueError:
        return Unknown(f"{path}: {found[:40]!r} is no statistics")
    return {"reads": reads, "read_ms": read_ms, "writes": writes, "write_ms": write_ms}
