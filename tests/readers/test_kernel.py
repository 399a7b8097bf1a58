"""The kernel's log: the real one where it can be written to, and a FIFO for what the real one would have to be broken for."""

from __future__ import annotations

import os
import select
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import TAKES_NODE_OUT
from holdfast.detectors.evidence import HangLimits
from holdfast.detectors.log_lines.xids import xid_of
from holdfast.detectors.nodes.health import judge, see_growth
from holdfast.detectors.nodes.readings import CounterGrowth, KernelLine, KernelReading, NodeReading
from holdfast.probe.readers.kernel import ELSEWHERE, KernelLog, parsed, read_kernel

KMSG = Path("/dev/kmsg")
WRITABLE = os.access(KMSG, os.R_OK | os.W_OK)


def written(text: str) -> None:
    """Write a line into the kernel's log; each writer may write ten lines in five seconds."""
    with KMSG.open("w") as log:
        log.write(f"<3>{text}\n")


def come(log: KernelLog, mark: str) -> list[KernelLine]:
    """Return the lines with *mark*, once the first is there."""
    found: list[KernelLine] = []
    while not found:
        assert select.select([log], [], [], 10)[0], f"no line with {mark} came"
        found = [line for line in log.read() if mark in line.text]
    return found


@pytest.mark.skipif(not WRITABLE, reason="needs root and a kernel log that takes lines")
def test_a_line_of_the_real_log_wakes_a_waiting_reader() -> None:
    """Only what comes after the beginning, with the level that it has, and no line twice."""
    mark = f"holdfast-test-{uuid.uuid4().hex}"
    written(f"{mark} before")
    with closing(KernelLog()) as log:
        written(f"{mark} after; and more")
        (line,) = come(log, mark)
        assert (line.level, line.text) == (3, f"{mark} after; and more")
        assert not [again for again in log.read() if mark in again.text]


@pytest.mark.skipif(not WRITABLE, reason="needs root and a kernel log that takes lines")
def test_a_reading_of_the_real_log_has_its_newest_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order."""
    monkeypatch.delenv(ELSEWHERE)
    mark = f"holdfast-test-{uuid.uuid4().hex}"
    written(f"{mark} one")
    written(f"{mark} two")
    found = [line for line in read_kernel().lines if mark in line.text]
    assert [line.text for line in found] == [f"{mark} one", f"{mark} two"]
    assert found[0].sequence < found[1].sequence


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[tuple[KernelLog, int]]:
    """Give a log on a FIFO, and the end to write it from."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    with closing(KernelLog(path)) as log:
        writer = os.open(path, os.O_WRONLY)
        yield log, writer
        os.close(writer)


def test_a_record_that_arrives_in_parts_is_one_record(fifo: tuple[KernelLog, int]) -> None:
    """And the lines below it (its device, its subsystem) are no records."""
    log, writer = fifo
    os.write(writer, b"4,10,5000,-;EXT4-fs er")
    assert log.read() == []
    os.write(writer, b"ror (device sda1)\n SUBSYSTEM=block\n DEVICE=b8:1\n6,11,6000,-,caller=T1;next\n")
    assert [(line.sequence, line.level, line.text) for line in log.read()] == [(10, 4, "EXT4-fs error (device sda1)"), (11, 6, "next")]


@pytest.mark.parametrize("raw", [b"", b"garbage", b" SUBSYSTEM=pci;x", b"6,x,5,-;text", b"6;text", b"\xff\xfe;\xff"])
def test_other_lines_are_ignored(raw: bytes) -> None:
    """Nothing that a log may hold ends its reading."""
    assert parsed(raw) is None


def test_the_facility_is_no_part_of_the_level() -> None:
    """A line from user space has facility 1: its number is 8 and more."""
    line = parsed(b"11,5,7,-;text; and more")
    assert line is not None
    assert (line.level, line.text) == (3, "text; and more")


def test_a_log_that_cannot_be_opened_is_an_error_of_the_system(tmp_path: Path) -> None:
    """The reading of the complete node makes it unknown."""
    with pytest.raises(FileNotFoundError):
        read_kernel(tmp_path)


def a_look(at: float, *texts: str, first: int = 1) -> NodeReading:
    """Return a reading with only the log of a node, a line a second."""
    lines = tuple(KernelLine(sequence=first + place, microseconds=place * 10**6, level=3, text=text) for place, text in enumerate(texts))
    return NodeReading(node="n0", at=at, kernel=KernelReading(lines=lines))


XID = "NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_only_lines_since_the_last_reading_count() -> None:
    """What stood there when the generation began has been answered, or is not its own."""
    before, same = a_look(0.0, XID), a_look(60.0, XID)
    assert see_growth(CounterGrowth(before=before, now=same), HangLimits()) == []
    now = a_look(60.0, XID, "I/O error, dev nvme0n1, sector 5 op 0x0:(READ)")
    (fault,) = judge(now, before)
    assert (fault.kind, fault.signature) == ("io-errors", "io-errors nvme0n1")
    assert "gpu-off-bus" in {fault.kind for fault in judge(before)}


@pytest.mark.parametrize(
    ("text", "part", "leaves"),
    [
        ("Aborting journal on device nvme0n1p2-8.", "nvme0n1p2", True),
        ("EXT4-fs (sda1): Remounting filesystem read-only", "sda1", True),
        ("Aborting journal on device loop0-8.", "loop0", False),
        ("EXT4-fs (loop7): Remounting filesystem read-only", "loop7", False),
        ("EXT4-fs (zram1): Remounting filesystem read-only", "zram1", False),
    ],
)
def test_only_a_disk_of_the_node_is_a_reason_to_leave_it(text: str, part: str, *, leaves: bool) -> None:
    """The image of a package or of a container is a file, mounted through a loop device."""
    (fault,) = judge(a_look(0.0, text))
    assert fault.device == part
    assert (CATALOGUE[fault.kind].recommended_action in TAKES_NODE_OUT) is leaves


@pytest.mark.parametrize(
    ("text", "code", "bus"),
    [
        (XID, 79, "0000:18:00.0"),
        ("NVRM: Xid (PCI:0000:C1:00.0): 94, Contained: SM (0x1)", 94, "0000:c1:00.0"),
        ("NVRM: Xid (0000:03:00): 31, Ch 00000010", 31, "0000:03:00.0"),
    ],
)
def test_an_xid_of_the_log_is_read_in_all_its_forms(text: str, code: int, bus: str) -> None:
    """Drivers of several ages write it differently."""
    xid = xid_of(text)
    assert xid is not None
    assert (xid.code, xid.bus) == (code, bus)
