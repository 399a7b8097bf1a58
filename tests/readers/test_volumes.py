"""What the kernel says of disks and mounts, read from a /sys and /proc of the test's own, and what real processes use of them."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.agent.monitor.line_checks import processes_of_job
from holdfast.detectors.codec import packed, unpacked
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.volumes import Volume, VolumeReading
from holdfast.probe.readers import volumes
from holdfast.probe.readers.volumes import read_memory_errors, read_volumes

STAT = "100 0 800 5 50 0 400 9 2 14 14 3 0 0 0 4 0"
MOUNTED = """22 1 8:1 / {root}/scratch rw,relatime - ext4 /dev/sda1 ro,errors=remount-ro
23 1 0:40 / {root}/pool rw - btrfs /dev/nvme1n1 rw
24 1 0:41 / {root}/home rw - nfs4 filer01:/export rw,addr=10.0.0.9
25 1 8:17 / / rw - ext4 /dev/sdb1 rw
"""


def write(root: Path, name: str, text: str) -> None:
    """Have a file of the node say *text*."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Give the root of a node with a SATA disk, an NVMe disk that two controllers reach, and a mapping on it."""
    port = "sys/devices/pci0000:00/ata2/host1/target1:0:0/1:0:0:0"
    disks = {f"{port}/block/sda": "8:0", f"{port}/block/sda/sda1": "8:1", "sys/devices/nvme1n1": "259:0", "sys/devices/dm-0": "253:0"}
    (tmp_path / "sys/class/block").mkdir(parents=True)
    for place, number in disks.items():
        write(tmp_path, f"{place}/dev", number)
        write(tmp_path, f"{place}/stat", STAT)
        (tmp_path / "sys/class/block" / Path(place).name).symlink_to(tmp_path / place)
    write(tmp_path, f"{port}/block/sda/sda1/partition", "1")
    write(tmp_path, f"{port}/block/sda/removable", "1")
    write(tmp_path, f"{port}/state", "running")
    write(tmp_path, f"{port}/ioerr_cnt", "0x1f")
    (tmp_path / port / "block/sda/device").symlink_to(tmp_path / port)
    (tmp_path / "sys/devices/dm-0/slaves/nvme1n1").mkdir(parents=True)
    for controller, state in {"nvme1": "live", "nvme2": "dead"}.items():
        write(tmp_path, f"sys/class/nvme/{controller}/state", state)
    (tmp_path / "sys/class/nvme/nvme1/nvme1c1n1").mkdir()
    (tmp_path / "sys/class/nvme/nvme2/nvme1c2n1").mkdir()
    write(tmp_path, "proc/self/mountinfo", MOUNTED.format(root=tmp_path).strip())
    for folder in ("scratch", "pool", "home"):
        (tmp_path / folder).mkdir()
    return tmp_path


def test_disks_partitions_mappings_and_controllers_are_read(node: Path) -> None:
    """With what each is on, its other names, its state, and how many requests it had and failed."""
    reading = read_volumes(node)
    assert not isinstance(reading.volumes, Unknown)
    found = {one.name: one for one in reading.volumes}
    names = ("8:0", "1:0:0:0", "ata2")
    assert found["sda"] == Volume(name="sda", aliases=names, state="running", failures=31, requests=159, removable=True)
    assert (found["sda1"].below, found["sda1"].requests) == (("sda",), 159)
    assert (found["nvme1n1"].below, found["dm-0"].below) == (("nvme1", "nvme2"), ("nvme1n1",))
    assert [found[name].state for name in ("nvme1", "nvme2")] == ["live", "dead"]
    assert unpacked(VolumeReading, json.loads(json.dumps(packed(reading)))) == reading


def test_each_mount_has_its_disk(node: Path) -> None:
    """By its number, else by the name of its source."""
    reading = read_volumes(node)
    assert not isinstance(reading.mounts, Unknown)
    assert [(name, mount.kind) for name, mount in reading.mounts] == [("sda1", "ext4"), ("nvme1n1", "btrfs"), ("", "nfs4"), ("", "ext4")]
    assert isinstance(reading.used, Unknown), "nobody asked"


def test_what_a_process_has_open_or_mapped_or_is_told_is_used(node: Path) -> None:
    """Of all processes that the agent began but for the monitor; at a line only what is open is read."""

    def used(monitor: int | None = None, text: str = "") -> set[str]:
        found = read_volumes(node, processes_of_job(os.getpid(), monitor), text).used
        assert not isinstance(found, Unknown), found.why
        return {name.removeprefix(str(node)) for name in found} & {"/scratch", "/pool", "/home", "sdz"}

    assert used() == set()
    (node / "scratch/a").write_text("0" * 10)
    with (node / "scratch/a").open("rb") as file:
        assert used() == used(text="a line") == {"/scratch"}
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert used() == {"/scratch"}
    mapped.close()
    assert used() == set()
    told = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", f"--data={node}/pool/tokens", "/dev/sdz"]
    child = subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=node / "home")
    assert child.stdout is not None
    child.stdout.readline()
    assert used() == {"/pool", "/home", "sdz"}
    assert used(text="a line") == {"/home"}
    assert used(monitor=child.pid) == set()
    child.communicate()


def test_what_a_container_or_a_forbidden_process_uses_is_not_known(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing counts as unused."""

    def refuse(process: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(process))

    with monkeypatch.context() as patched:
        patched.setattr(volumes, "_open_files", refuse)
        used = read_volumes(node, [os.getpid()]).used
        assert isinstance(used, Unknown)
        assert "Permission denied" in used.why
    write(node, "proc/self/mountinfo", "25 1 0:50 / / rw - overlay overlay rw")
    assert isinstance(read_volumes(node, [os.getpid()]).used, Unknown)


def test_only_the_mounts_of_the_server_in_the_line_are_asked_whether_they_answer(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not within the time has no answer."""
    text = "nfs: server filer01 not responding, still trying"
    assert read_volumes(node, text=text.replace("filer01", "filer011")).answers == {}
    assert read_volumes(node, text=text).answers == {}, "there is no such folder below the root"
    (node / str(node / "home").lstrip("/")).mkdir(parents=True)
    assert read_volumes(node, text=text).answers == {str(node / "home"): True}
    monkeypatch.setattr(os, "statvfs", lambda _: time.sleep(60))
    assert read_volumes(node, text=text).answers == {str(node / "home"): False}


def test_uncorrected_errors_of_memory_are_read_by_controller(tmp_path: Path) -> None:
    """All of them, or nothing."""
    assert isinstance(read_memory_errors(tmp_path).uncorrected, Unknown)
    for name, count in {"mc0": "0", "mc1": "3"}.items():
        write(tmp_path, f"sys/devices/system/edac/mc/{name}/ue_count", count)
    write(tmp_path, "sys/devices/system/edac/mc/power/control", "auto")
    assert read_memory_errors(tmp_path).uncorrected == {"mc0": 0, "mc1": 3}
    (tmp_path / "sys/devices/system/edac/mc/mc1/ue_count").unlink()
    assert isinstance(read_memory_errors(tmp_path).uncorrected, Unknown)
