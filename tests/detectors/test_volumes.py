"""What the kernel says of a disk or a file system that a line names: it contradicts the line, agrees, sees it unused, or is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import KERNEL_LOG, Fault
from holdfast.detectors.diagnosis import diagnose, see
from holdfast.detectors.evidence import HangLimits, LogLine, Unknown, WorkerExit
from holdfast.detectors.nodes.line_check import NOTHING, LineCheck
from holdfast.detectors.nodes.memory_errors import MemoryErrors, check_memory_line, is_about_memory
from holdfast.detectors.nodes.readings import Mount
from holdfast.detectors.nodes.volumes import Volume, VolumeReading, check_volume_line, is_about_volume, is_unused
from holdfast.policies.recovery.case import Case

UNKNOWN = Unknown("refused")
SDA = Volume(name="sda", aliases=("8:0", "2:0:0:0", "ata2"), state="running", failures=4, requests=900)
VOLUMES = (
    SDA,
    Volume(name="sda1", below=("sda",), failures=UNKNOWN, requests=880),
    Volume(name="nvme1", state="live", failures=UNKNOWN, requests=0),
    Volume(name="nvme1n1", below=("nvme1",), failures=UNKNOWN, requests=50),
    Volume(name="dm-0", below=("nvme1n1",), aliases=("253:0",), failures=UNKNOWN, requests=40),
)
RW, RO = ("rw",), ("ro", "errors=remount-ro")


def mount(path: str, source: str, kind: str = "ext4", own: tuple[str, ...] = RW) -> Mount:
    """Return a mount."""
    return Mount(path=path, kind=kind, source=source, options=("rw",), own_options=own)


MOUNTS = (
    ("sda1", mount("/scratch", "/dev/sda1")),
    ("dm-0", mount("/data", "/dev/mapper/vg-data", "xfs")),
    ("", mount("/home", "filer01:/export/home", "nfs4")),
    ("", mount("/lustre", "10.0.0.1@o2ib:10.0.0.2@o2ib:/fs1", "lustre")),
)
FIRST = VolumeReading(at=0.0, volumes=VOLUMES, mounts=MOUNTS, used=("/",), answers={})
EARLIER = replace(FIRST, at=60.0)
NOW = replace(FIRST, at=100.0)


def having(reading: VolumeReading, name: str, **facts: Any) -> VolumeReading:
    """Return *reading* with other facts of the volume *name*."""
    assert not isinstance(reading.volumes, Unknown)
    return replace(reading, volumes=tuple(replace(one, **facts) if one.name == name else one for one in reading.volumes))


def without(reading: VolumeReading, *names: str) -> VolumeReading:
    """Return *reading* without some volumes."""
    assert not isinstance(reading.volumes, Unknown)
    return replace(reading, volumes=tuple(one for one in reading.volumes if one.name not in names))


def read_only(path: str) -> VolumeReading:
    """Return the reading in which the kernel has made a mount read-only."""
    return replace(NOW, mounts=tuple((name, replace(one, own_options=RO) if one.path == path else one) for name, one in MOUNTS))


def check(kind: str, text: str, now: VolumeReading = NOW, *earlier: VolumeReading) -> LineCheck:
    """Return the check of a line, 40 s after the newest reading from before."""
    return check_volume_line(kind, text, earlier or [FIRST, EARLIER], now, 40.0)


REMOUNT = ("filesystem-read-only", "EXT4-fs (sda1): Remounting filesystem read-only")
REMOVED = ("nvme-gone", "nvme nvme1: Removing after probe failure status: -19")
IO_ERROR = ("io-errors", "I/O error, dev sda, sector 3311 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2")
NFS = ("nfs-silent", "nfs: server filer01 not responding, still trying")


@pytest.mark.parametrize(
    ("line", "now", "contradicted"),
    [
        (REMOUNT, NOW, "/scratch is mounted and writable"),
        (REMOVED, NOW, "nvme1 is live"),
        (IO_ERROR, NOW, "by its counter sda failed no request in 40 s around the line, and it is running"),
        (("nvme-reset", "nvme nvme7: I/O 4 QID 0 timeout, reset controller"), NOW, "this node has no nvme7"),
        (("journal-aborted", "Aborting journal on device sdq1-8."), NOW, "this node has no sdq1"),
        (NFS, replace(NOW, answers={"/home": True}), "/home answers"),
    ],
)
def test_a_state_that_cannot_be_after_such_a_line_contradicts_it(line: tuple[str, str], now: VolumeReading, contradicted: str) -> None:
    """The mount is writable, the controller live, no request was counted as failed, the server answers."""
    found = check(*line, now)
    assert (found.contradicted, found.supported) == (contradicted, "")


@pytest.mark.parametrize(
    ("line", "now", "supported"),
    [
        (REMOUNT, read_only("/scratch"), "/scratch became read-only"),
        (("journal-aborted", "Aborting journal on device sda1-8."), read_only("/scratch"), "/scratch became read-only"),
        (REMOVED, having(NOW, "nvme1", state="dead"), "nvme1 is dead"),
        (("nvme-reset", "nvme nvme1: resetting controller"), having(NOW, "nvme1", state="resetting"), "nvme1 is resetting"),
        (("scsi-failed", "sd 2:0:0:0: rejecting I/O to offline device"), having(NOW, "sda", state="offline"), "sda is offline"),
        (
            ("sata-error", "ata2.00: exception Emask 0x10 action 0xe frozen"),
            having(NOW, "sda", failures=6),
            "sda failed 2 requests in 40 s",
        ),
        (IO_ERROR, having(NOW, "sda", failures=5), "sda failed 1 request in 40 s"),
        (("xfs-shutdown", "XFS (dm-0): Filesystem has been shut down"), having(NOW, "nvme1", state="dead"), "nvme1 is dead"),
        (REMOVED, without(NOW, "nvme1", "nvme1n1", "dm-0"), "nvme1 is gone"),
        (NFS, replace(NOW, answers={"/home": False}), "/home does not answer"),
    ],
)
def test_a_state_that_follows_from_such_a_line_agrees_with_it(line: tuple[str, str], now: VolumeReading, supported: str) -> None:
    """Of the disk that it names, or of one below it."""
    found = check(*line, now)
    assert (found.contradicted, found.supported) == ("", supported)


@pytest.mark.parametrize(
    ("line", "now", "earlier"),
    [
        (REMOUNT, replace(NOW, mounts=UNKNOWN), EARLIER),
        (REMOUNT, replace(NOW, mounts=()), EARLIER),
        (REMOVED, having(NOW, "nvme1", state=UNKNOWN), EARLIER),
        (IO_ERROR, NOW, having(EARLIER, "sda", failures=UNKNOWN)),
        (IO_ERROR, NOW, having(EARLIER, "sda", failures=5)),
        (IO_ERROR, having(NOW, "sda", removable=True), EARLIER),
        (("io-errors", "Buffer I/O error on dev dm-0, logical block 3311, async page read"), NOW, EARLIER),
        (("xfs-shutdown", "XFS (dm-0): Filesystem has been shut down due to log error (0x2)."), NOW, EARLIER),
        (("nvme-reset", "nvme nvme1: resetting controller"), NOW, EARLIER),
        (("nvme-reset", "nvme nvme7: resetting controller"), NOW, replace(EARLIER, volumes=UNKNOWN)),
        (NFS, NOW, EARLIER),
    ],
)
def test_what_cannot_be_measured_says_nothing_of_the_line(line: tuple[str, str], now: VolumeReading, earlier: VolumeReading) -> None:
    """Neither for it nor against it: an XFS that was shut down is still mounted as writable, and a disk that was reset works again."""
    found = check(*line, now, FIRST, earlier)
    assert (found.contradicted, found.supported) == ("", "")


@pytest.mark.parametrize(
    ("text", "facts", "unused"),
    [
        ("XFS (dm-0): Internal error", {}, True),
        ("nvme nvme1: I/O 4 QID 0 timeout, reset controller", {}, True),
        ("EXT4-fs warning (device sda1): error", {}, True),
        ("nfs: server filer01 not responding, still trying", {}, True),
        ("nfs: server filer01 not responding, still trying", {"used": ("/", "/home")}, False),
        ("LustreError: 11-0: fs1-OST0001-osc: operation ost_read failed", {"used": ("/", "/lustre")}, False),
        ("nvme nvme1: I/O 4 QID 0 timeout, reset controller", {"used": ("/", "/data")}, False),
        ("nvme nvme1: I/O 4 QID 0 timeout, reset controller", {"used": ("/", "nvme1n1")}, False),
        ("nvme nvme1: I/O 4 QID 0 timeout, reset controller", {"used": UNKNOWN}, False),
        ("nvme nvme1: I/O 4 QID 0 timeout, reset controller", {"at": 5.0}, False),
        ("nvme nvme1: I/O 4 QID 0 timeout, reset controller", {"mounts": UNKNOWN}, False),
        ("megaraid_sas 0000:65:00.0: FW in FAULT state", {}, False),
    ],
)
def test_a_disk_is_unused_where_nothing_of_the_job_is_and_nothing_is_asked_of_it(text: str, facts: dict[str, Any], *, unused: bool) -> None:
    """What is not known counts as used, and so does what was used at an earlier reading."""
    assert check("xfs-corruption", text, NOW, FIRST, replace(EARLIER, **facts)).unused == unused


def test_a_disk_that_was_sent_requests_counts_as_used() -> None:
    """A file that is read and closed at once is open at no reading."""
    busy = having(EARLIER, "nvme1n1", requests=51)
    assert not check("nvme-reset", "nvme nvme1: I/O 4 QID 0 timeout, reset controller", NOW, FIRST, busy).unused
    assert not check("nvme-reset", "nvme nvme1: I/O 4 QID 0 timeout, reset controller", NOW, without(FIRST, "nvme1n1"), EARLIER).unused


def test_a_fault_that_was_measured_may_be_of_an_unused_mount() -> None:
    """By its path or its disk; nothing is said of a file system without a disk or a server."""
    temporary = replace(NOW, mounts=(*MOUNTS, ("", mount("/dev/shm", "tmpfs", "tmpfs"))))
    readings = [FIRST, temporary]
    parts = {part: is_unused(part, readings, temporary) for part in ("/data", "/home", "sda", "/dev/shm", "/gone")}
    assert parts == {"/data": True, "/home": True, "sda": True, "/dev/shm": False, "/gone": False}
    assert not is_unused("/data", [FIRST, replace(EARLIER, used=("/data",))], NOW)


def test_only_lines_of_disks_file_systems_and_memory_are_checked_so() -> None:
    """Those of links are checked elsewhere."""
    about = set(filter(is_about_volume, CATALOGUE))
    assert {"nvme-gone", "xfs-shutdown", "io-errors", "nfs-silent", "raid-disk-failed", "filesystem-read-only"} < about
    assert about.isdisjoint({"link-down", "gpu-off-bus", "checkpoint-write-failed"})
    assert list(filter(is_about_memory, CATALOGUE)) == ["memory-uncorrected"]


# -- memory ------------------------------------------------------------------------------------------------------------

NOT_COUNTED = LineCheck(contradicted="by its counter mc1 had no uncorrected error in 40 s around the line")
UE = "EDAC MC1: 1 UE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0 (channel:0 slot:0)"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"mc0": 0, "mc1": 2}, {"mc0": 0, "mc1": 3}, LineCheck(supported="mc1 counted 1 uncorrected error in 40 s")),
        ({"mc0": 0, "mc1": 2}, {"mc0": 0, "mc1": 5}, LineCheck(supported="mc1 counted 3 uncorrected errors in 40 s")),
        (
            {"mc0": 0, "mc1": 2},
            {"mc0": 1, "mc1": 2},
            LineCheck(contradicted="by its counter mc1 had no uncorrected error in 40 s around the line"),
        ),
        ({"mc0": 0}, {"mc0": 0}, LineCheck(contradicted="this node has no memory controller mc1")),
        ({"mc1": 2}, {"mc1": 0}, NOTHING),
        ({"mc1": 2}, {"mc0": 0}, NOTHING),
        ({}, {}, NOTHING),
        (UNKNOWN, {"mc1": 2}, NOTHING),
        ({"mc1": 2}, UNKNOWN, NOTHING),
    ],
)
def test_an_uncorrected_error_of_memory_is_counted(
    before: dict[str, int] | Unknown, after: dict[str, int] | Unknown, expected: LineCheck
) -> None:
    """A counter that did not move contradicts the line; one that is not there says nothing."""
    old, now = MemoryErrors(uncorrected=before), MemoryErrors(uncorrected=after)
    assert check_memory_line("memory-uncorrected", UE, [old, old], now, 40.0) == expected
    assert check_memory_line("memory-uncorrected", UE, [], now, 40.0) == NOTHING
    assert (
        check_memory_line("memory-uncorrected", "mce: Uncorrected hardware memory error in user-access", [old, old], now, 40.0) == NOTHING
    )


# -- what follows from it ----------------------------------------------------------------------------------------------


def fault(text: str, **measured: Any) -> Fault:
    """Return the fault that a line of the kernel log of n0 is taken for, with what was measured."""
    (found,) = see([LogLine(text=text, at=1.0, node="n0", log=KERNEL_LOG)], HangLimits())
    return replace(found, **measured)


def leaving(*faults: Fault) -> tuple[str, ...]:
    """Return the nodes that an incident with these faults takes out, where there are spares for all."""
    return Case(now=3.0, diagnosis=diagnose(faults), members=("n0", "n1"), spares=("s0", "s1")).unfit


@pytest.mark.parametrize("ruled_out", [{"idle": True}, {"contradicted": "/scratch is mounted and writable"}])
@pytest.mark.parametrize("text", [REMOUNT[1], REMOVED[1], "XFS (dm-0): Filesystem has been shut down due to log error (0x2)."])
def test_a_line_of_a_disk_that_is_ruled_out_is_not_the_cause_of_a_hang(text: str, ruled_out: dict[str, Any]) -> None:
    """Without a measurement the two confirm each other, and the node is left."""
    hang = Fault(kind="job-hang", at=60.0, node="n0", rank=0, quote="rank 0 does not come")
    assert diagnose([fault(text), hang]).root.kind != "job-hang"
    assert leaving(fault(text), hang) == ("n0",)
    wrong = fault(text, **ruled_out)
    assert (diagnose([wrong, hang]).root.kind, leaving(wrong, hang)) == ("job-hang", ())


def test_a_line_of_memory_that_the_counter_contradicts_leaves_a_killed_rank_its_cause() -> None:
    """It proves the fault by itself otherwise, and takes the node out."""
    kill = see([WorkerExit(node="n0", rank=0, at=1.1, signal=9)], HangLimits())
    for right in (fault(UE), fault(UE, supported="mc1 counted 1 uncorrected error in 40 s")):
        assert (diagnose([right, *kill]).root.kind, leaving(right, *kill)) == ("memory-uncorrected", ("n0",))
    wrong = fault(UE, contradicted=NOT_COUNTED.contradicted)
    assert (diagnose([wrong, *kill]).root.kind, leaving(wrong, *kill)) == ("worker-sigkill", ())
