"""Mounts and disks: tables of a test's own, this machine's, and a real file system that the kernel makes read-only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.health import judge
from holdfast.detectors.nodes.readings import Mount, NodeReading, StorageReading
from holdfast.probe.readers.storage import mounted, read_disks, with_space
from tests.mentions import mentions

Tree = Callable[[dict[str, str]], Path]

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
28 27 0:25 / /with\040blank ro,nosuid - nfs4 server:/data ro,vers=4.2
29 27 254:0 /sub /again rw - ext4 /dev/vda rw
30 27 0:30 / /hidden rw - tmpfs below rw
31 30 0:31 / /hidden rw - tmpfs above rw
32 27 8:1 / /forced rw - xfs /dev/sda1 ro
"""


def judged(*mounts: Mount) -> list[Fault]:
    """Return the faults of a node that has these mounts."""
    return judge(NodeReading(node="n0", at=0.0, storage=StorageReading(mounts=mounts, disks=())))


def test_each_file_system_is_listed_once_as_it_can_be_seen(tree: Tree) -> None:
    """Neither what keeps no files, nor a second place of the same, nor what lies hidden below another mount."""
    found = mounted(tree({"proc/self/mountinfo": TABLE}))
    assert not isinstance(found, Unknown)
    assert [(mount.path, mount.kind, mount.source) for mount in found] == [
        ("/", "ext4", "/dev/vda"),
        ("/with blank", "nfs4", "server:/data"),
        ("/hidden", "tmpfs", "above"),
        ("/forced", "xfs", "/dev/sda1"),
    ]
    (quote,) = [fault.quote for fault in judged(*found)]
    assert mentions(quote, "/forced (/dev/sda1)", "read-only")


def test_a_table_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """Nothing is said about mounts then."""
    assert isinstance(mounted(tmp_path), Unknown)


def test_this_machines_disks_and_mounts_are_read() -> None:
    """The file system of this file is among them, with as much space as the system says."""
    mounts = mounted()
    assert not isinstance(mounts, Unknown)
    root = with_space(next(mount for mount in mounts if mount.path == "/"))
    figures = os.statvfs("/")
    assert root.size == figures.f_blocks * figures.f_frsize
    assert not isinstance(root.free, Unknown)
    assert 0 <= root.free <= figures.f_blocks * figures.f_frsize


def test_disks_are_read_from_what_the_kernel_counts(tree: Tree) -> None:
    """Those that are only made of others, or of memory, are left out."""
    stat = "5776661 318822 208997698 5774838 1432972 1499850 181288384 1075728 0 776800 7016931"
    found = read_disks(
        tree({"sys/block/nvme0n1/stat": stat, "sys/block/nvme0n1/ro": "0", "sys/block/loop0/stat": stat, "sys/block/sdb/ro": "1"})
    )
    assert not isinstance(found, Unknown)
    disk, dark = found
    assert (disk.name, disk.read_only, disk.counters) == (
        "nvme0n1",
        False,
        {"reads": 5776661, "read_ms": 5774838, "writes": 1432972, "write_ms": 1075728},
    )
    assert (dark.name, dark.read_only, isinstance(dark.counters, Unknown)) == ("sdb", True, True)


def test_a_mount_that_was_removed_is_unknown(tmp_path: Path) -> None:
    """Between reading the table and the mount; its name stays known."""
    gone = with_space(Mount(path="/gone", kind="nfs4", source="server:/data", options=("rw",), own_options=("rw",)), tmp_path)
    assert isinstance(gone.size, Unknown)
    assert "No such file" in gone.size.why
    assert gone.failed == 0


def run(*command: str | Path) -> bool:
    """Say whether *command* could be run."""
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a real ext4 file system of 16 MB that becomes read-only when it meets an error."""
    image, place = tmp_path / "disk", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    place.mkdir()
    if os.geteuid() or not shutil.which("mkfs.ext4") or not run("mkfs.ext4", "-q", image):
        pytest.skip("needs root and mkfs.ext4")
    if not run("mount", "-o", "loop,errors=remount-ro", image, place):
        pytest.skip("needs to be allowed to mount")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def the_mount(place: Path) -> Mount:
    """Return what the readers see of *place*."""
    found = mounted()
    assert not isinstance(found, Unknown)
    return with_space(next(mount for mount in found if mount.path == str(place)))


def test_a_full_disk_and_a_broken_one_are_found(small_disk: Path) -> None:
    """Both are real: hardly a byte is free, then the kernel itself meets an error and refuses to write."""
    assert judged(the_mount(small_disk)) == []
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "big").write_bytes(bytes(32 << 20))
    (full,) = judged(the_mount(small_disk))
    assert full.kind == "disk-full"
    assert mentions(full.quote, "space left")  # how much the kernel keeps back of so small a disk differs
    (small_disk / "big").unlink()
    trigger = Path("/sys/fs/ext4") / Path(the_mount(small_disk).source).name / "trigger_fs_error"
    if not trigger.exists():
        pytest.skip("this kernel cannot be made to meet an error")
    trigger.write_text("1")
    assert sorted(fault.kind for fault in judged(the_mount(small_disk))) == ["filesystem-read-only", "io-errors"]
