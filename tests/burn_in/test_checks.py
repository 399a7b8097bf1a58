"""Each check against the fault that it is there for: a wrong result, a bit that sticks, bytes that changed, a clock that stepped."""

from __future__ import annotations

import hashlib
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.detectors.nodes.burn_in_results import CheckMark
from holdfast.probe.burn_in.checks import clock as ticking
from holdfast.probe.burn_in.checks import compute, disk, memory, traffic
from holdfast.probe.burn_in.checks.core_pool import CoreEnded, judged
from holdfast.security.authenticated_listener import MAX_PENDING
from tests.mentions import mentions

TOKEN = "0123456789abcdef" * 2


def test_correct_arithmetic_has_the_known_answers() -> None:
    """All three kinds of work, on this machine's CPU."""
    assert [work() for work in compute.WORKS.values()] == [""] * 3


def test_one_wrong_hash_in_a_chain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that errs once produces another end."""
    times = iter(range(10**9))

    def sha256(data: bytes) -> Any:
        flip = next(times) == compute.LINKS // 2
        digest = hashlib.sha256(data).digest()
        wrong = bytes([digest[0] ^ flip, *digest[1:]])
        return SimpleNamespace(digest=lambda: wrong)

    monkeypatch.setattr(compute, "hashlib", SimpleNamespace(sha256=sha256))
    assert "hashes ended in" in compute.chain()


def test_a_wrong_power_and_a_wrong_sum_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a multiplier that loses a bit, and a sum that rounds."""
    monkeypatch.setattr(compute, "pow", lambda *numbers: pow(*numbers) ^ 4, raising=False)
    assert "not 1" in compute.power()
    monkeypatch.setattr(compute, "math", SimpleNamespace(fsum=lambda terms: sum(terms) + 1.0))
    assert "in floating point" in compute.products()


def test_work_stops_at_the_first_wrong_answer() -> None:
    """It names the work, and counts the rounds before it."""
    answers = iter(["", "", "bad"])
    found = compute._work_until(time.monotonic() + 60, {"adding": lambda: next(answers)})
    assert found == {"rounds": 2, "wrong": "adding: bad"}


def test_a_crash_fails_and_a_kill_is_skipped() -> None:
    """A crash is a fault of the node, running out of memory is not, and one wrong core is named."""
    fine: dict[str, Any] = {"wrong": ""}
    result = judged("compute", {0: fine, 3: {"wrong": "7 is 8"}}, {}, fine="well", seconds=0.0)
    assert (result.mark, result.words) == (CheckMark.FAILED, "core 3: 7 is 8")
    assert judged("compute", {0: fine, 1: CoreEnded(-11)}, {}, fine="well", seconds=0.0).mark is CheckMark.FAILED
    killed = judged("compute", {0: fine, 1: CoreEnded(-9)}, {}, fine="well", seconds=0.0)
    assert killed.mark is CheckMark.SKIPPED
    assert mentions(killed.words, "core 1", "SIGKILL")
    assert judged("compute", {0: fine}, {}, fine="well", seconds=0.0).mark is CheckMark.PASSED


class StuckBit(bytearray):
    """Memory in which one bit stays as it is."""

    place, bit, value = 3 * memory.BLOCK // 2, 1 << 5, 0

    def __setitem__(self, where: Any, what: Any) -> None:
        super().__setitem__(where, what)
        super().__setitem__(self.place, self[self.place] & ~self.bit | self.value)


class Alias(bytearray):
    """Memory of which one block answers for another: a line of the address that is broken."""

    def __setitem__(self, where: Any, what: Any) -> None:
        super().__setitem__(where, what)
        if where.start == 2 * memory.BLOCK:
            super().__setitem__(slice(0, memory.BLOCK), what)


@pytest.mark.parametrize("value", [0, 1 << 5])
def test_a_stuck_bit_is_found(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether at 0 or at 1; the address is reported."""
    monkeypatch.setattr(StuckBit, "value", value)
    found = memory.march(StuckBit(4 * memory.BLOCK), time.monotonic() + 60)
    assert f"was read at {StuckBit.place:#x}" in found["wrong"]


def test_aliased_blocks_are_found_by_their_addresses() -> None:
    """A constant pattern would look correct in both."""
    found = memory.march(Alias(4 * memory.BLOCK), time.monotonic() + 60)
    assert found["wrong"].startswith("pattern addresses:")
    assert found["patterns"] == 0


def test_healthy_memory_passes_every_pattern() -> None:
    """One pattern does not disturb the next."""
    ends = iter([0.0] * (len(memory.PATTERNS) - 1) + [1.0])

    def clock() -> float:
        return next(ends)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "time", SimpleNamespace(monotonic=clock))
        found = memory.march(bytearray(2 * memory.BLOCK), 1.0)
    assert found == {"patterns": len(memory.PATTERNS), "bytes": 2 * 2 * memory.BLOCK * len(memory.PATTERNS), "wrong": ""}


def test_no_more_memory_is_used_than_is_free(tmp_path: Path) -> None:
    """In a container no more than its limit leaves, if that is less than the machine has."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert memory.free_bytes(tmp_path) == 4000 * 1024
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("3000000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("2000000\n")
    assert memory.free_bytes(tmp_path) == 1_000_000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert memory.free_bytes(tmp_path) == 4000 * 1024


@pytest.fixture
def written(tmp_path: Path) -> disk.Written:
    """Give a file of three blocks that the disk has taken."""
    return disk.write(tmp_path / "blocks", 3, until=time.monotonic() + 60)


def test_a_file_is_read_as_it_was_written(written: disk.Written) -> None:
    """Without a fault there is no message."""
    assert disk.read_back(written) == ""


def test_a_byte_that_changed_on_the_disk_is_found(written: disk.Written) -> None:
    """The message names its block."""
    with written.path.open("r+b") as file:
        file.seek(disk.BLOCK + 77)
        byte = file.read(1)[0]
        file.seek(disk.BLOCK + 77)
        file.write(bytes([byte ^ 1]))
    result = disk.verified(written, time.monotonic(), free=0)
    assert result.mark is CheckMark.FAILED
    assert mentions(result.words, "block 1 of 3", "checksum")


def test_swapped_and_missing_blocks_are_found(written: disk.Written) -> None:
    """Each contains its number, and their count is known."""
    data = written.path.read_bytes()
    written.path.write_bytes(data[disk.BLOCK :] + data[: disk.BLOCK])
    assert "block 0 of 3" in disk.read_back(written)
    written.path.write_bytes(data[: 2 * disk.BLOCK + 5])
    assert mentions(disk.read_back(written) or "", "block 2 of 3", "5 bytes")


def test_a_disk_check_measures_speed_and_leaves_no_file(tmp_path: Path) -> None:
    """The folder is as empty as before."""
    result = disk.disk(str(tmp_path), 2 * disk.BLOCK, seconds=30)
    assert result.mark is CheckMark.PASSED
    assert result.figures["MB"] == pytest.approx(2 * disk.BLOCK / 1e6)
    assert result.figures["written MB/s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_no_fault_of_a_disk(tmp_path: Path) -> None:
    """The cluster file names the wrong one; a disk without space is the node's fault."""
    result = disk.disk(str(tmp_path / "gone"), disk.BLOCK, seconds=1)
    assert (result.mark, "No such file" in result.words) == (CheckMark.SKIPPED, True)
    full = disk.disk(str(tmp_path), 100, seconds=1)
    assert full.mark is CheckMark.FAILED
    assert mentions(full.words, "minimum")


def test_even_clocks_pass() -> None:
    """This machine's own."""
    assert ticking.ticking(0.05).mark is CheckMark.PASSED


def test_a_monotonic_clock_that_goes_back_is_found() -> None:
    """The message says by how much."""
    reads = iter([10.0, 10.0, 10.1, 9.6])
    result = ticking.ticking(60.0, monotonic=lambda: next(reads))
    assert result.mark is CheckMark.FAILED
    assert mentions(result.words, "monotonic clock", "0.500000 s")


def test_a_clock_that_is_stepped_is_found() -> None:
    """Compared with the monotonic one; one that does not advance is found too."""
    start = time.time()
    reads, ticks = iter([start, start + 7.0]), count()
    result = ticking.ticking(0.01, monotonic=lambda: next(ticks) / 1000, wall=lambda: next(reads))
    assert result.mark is CheckMark.FAILED
    assert "+6.9" in result.words


class Clocks:
    """Two clocks that agree, and a process that is stopped for five seconds right before, or after, it reads one of them."""

    def __init__(self, read: int, *, after: bool) -> None:
        self.now, self.reads, self.stopped_at, self.after = 100.0, 0, read, after

    def monotonic(self) -> float:
        """Read the one; that takes a moment."""
        self.now += 0.001
        return self.now

    def wall(self) -> float:
        """Read the other."""
        self.reads += 1
        stop = 5.0 if self.reads == self.stopped_at else 0.0
        shown = self.now + (0.0 if self.after else stop)
        self.now += stop
        return shown


@pytest.mark.parametrize("read", [1, 2])
@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_is_stopped_while_it_reads_the_clocks_is_no_fault_of_theirs(read: int, *, after: bool) -> None:
    """On a busy node it waits for its turn between any two reads."""
    clocks = Clocks(read, after=after)
    result = ticking.ticking(0.01, monotonic=clocks.monotonic, wall=clocks.wall)
    assert clocks.reads == 2
    assert result.mark is CheckMark.PASSED, result.words


def test_other_clients_on_the_port_do_not_fail_the_network_check() -> None:
    """Many silent ones, and one that sends a byte now and then for longer than the check may take."""
    port, over = queue.SimpleQueue[int](), threading.Event()
    with ThreadPoolExecutor() as hands, ExitStack() as strangers:
        serving = hands.submit(traffic.serve, TOKEN, 1, 60.0, 0, port.put)
        door = ("127.0.0.1", port.get())
        for _ in range(2 * MAX_PENDING):
            strangers.enter_context(socket.create_connection(door, timeout=60))
        trickle = strangers.enter_context(socket.create_connection(door, timeout=60))
        hands.submit(_trickled, trickle, over)
        sent = traffic.send(TOKEN, 1, 60.0, *door)
        over.set()
        assert (sent.mark, serving.result().mark) == (CheckMark.PASSED, CheckMark.PASSED), (sent.words, serving.result().words)


def _trickled(line: socket.socket, over: threading.Event) -> None:
    with suppress(OSError):
        while not over.wait(0.2):
            line.sendall(b"0")


def test_a_network_check_without_a_client_is_skipped() -> None:
    """Whatever other clients did meanwhile: it says nothing about the node."""
    port = queue.SimpleQueue[int]()
    with ThreadPoolExecutor() as hands:
        serving = hands.submit(traffic.serve, TOKEN, 1, 3.0, 0, port.put)
        with socket.create_connection(("127.0.0.1", port.get()), timeout=60) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            result = serving.result()
    assert result.mark is CheckMark.SKIPPED
    assert mentions(result.words, "token")
