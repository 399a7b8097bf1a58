"""The lookout beside a real agent: a kernel log, errors of GPUs through the real pynvml, counters that grow while a worker dies."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.agent.monitor.kernel_log import KernelLogFollower
from holdfast.agent.monitor.line_checks import BEFORE
from holdfast.agent.monitor.loop import MAX_LINES, QUIET, Deduplicator, EventBudget
from holdfast.agent.monitor.nvml_events import NAME as LISTENER
from holdfast.control.agents.events import NodeFaultSeen
from holdfast.control.faults.node_faults import Announcements, NodeFaultDedup
from holdfast.detectors.log_lines.kernel_lines import finding_of
from holdfast.detectors.nodes.findings import FaultFinding
from holdfast.detectors.nodes.readings import KernelLine
from holdfast.host.process import children_of, state_of
from holdfast.protocol import Message
from tests.agent.rig import CLIENT, Flow, Node
from tests.mentions import mentions
from tests.readers.conftest import built
from tests.waiting import wait_until

SLEEPER = CLIENT + "hello(); time.sleep(600)"
NIC = "sys/class/net/eth0"
FILES = {"device/vendor": "0x15b3", "flags": "0x1003", "operstate": "up", "carrier": "1", "speed": "100000", "carrier_down_count": "1"}
OFF_BUS = "NVRM: Xid (PCI:0000:18:00): 79, pid=42, GPU has fallen off the bus."


class Broken:
    """A node of which the test may break parts."""

    def __init__(self, node: Node, base: Path) -> None:
        self.node, self.root = node, base / "root"
        self.events, self.state, self.log = base / "events", base / "state", base / "kmsg"
        for name, text in {**FILES, "statistics/rx_crc_errors": "5"}.items():
            self.write(f"{NIC}/{name}", text)
        for name, text in {**FILES, "carrier": "0", "operstate": "down"}.items():
            self.write(f"sys/class/net/eth1/{name}", text)
        self.events.touch()
        self.state.touch()
        os.mkfifo(self.log)
        self._writer = os.open(self.log, os.O_RDWR)

    def write(self, name: str, text: str) -> None:
        """Have a file of the node say *text*."""
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text + "\n")

    def logs(self, text: str) -> None:
        """Have the kernel log a line."""
        os.write(self._writer, f"3,1,1,-;{text}\n".encode())

    def happens(self, gpu: int, xid: int) -> None:
        """Have an error of a GPU happen."""
        with self.events.open("a") as file:
            file.write(f"{gpu} {xid}\n")

    def lookout(self) -> int | None:
        """Return the pid of the lookout, once there is one."""
        return next((pid for pid in children_of(self.node.agent) if b"holdfast.agent.monitor" in _of(pid, "cmdline")), None)

    def close(self) -> None:
        """Close the log."""
        os.close(self._writer)


def _of(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _kill_listener(lookout: int) -> None:
    """Kill whoever listens to the GPUs' driver, and wait for the next one."""

    def listener() -> int | None:
        return next((pid for pid in children_of(lookout) if _of(pid, "comm").strip() == LISTENER.encode()), None)

    gone = wait_until(listener, seconds=60)
    assert gone is not None
    os.kill(gone, signal.SIGKILL)
    wait_until(lambda: listener() not in {None, gone}, seconds=60)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of a stand-in for NVIDIA's library."""
    return built(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def broken(new_node: Node, tmp_path: Path, library: Path) -> Iterator[Broken]:
    """Give a node with GPUs, a network interface and a kernel log of the test's own."""
    made = Broken(new_node, tmp_path)
    where = ("--kernel-log", str(made.log), "--root", str(made.root))
    new_node.begin(*where, LD_LIBRARY_PATH=str(library), NVML_STAND_IN_STATE=str(made.state), NVML_STAND_IN_EVENTS=str(made.events))
    yield made
    made.close()


def fault(flow: Flow, kind: str, source: str) -> Message:
    """Wait for a fault of the node, reported by *source*."""
    return flow.wait("node.fault", kind=kind, source=f"{source} on node")


def test_faults_of_a_node_are_reported_as_they_happen(broken: Broken) -> None:
    """By its log, its driver, its counters; what grew while a worker died comes with its generation; a lookout that dies comes again."""
    with broken.node.flow().attach(0) as flow:
        flow.prepare(broken.node, [sys.executable, broken.node.script(SLEEPER)], watch=True)
        flow.start(3)
        flow.wait("worker.hello")
        first = wait_until(broken.lookout, seconds=60)
        assert first is not None
        broken.logs("usb 1-1: new high-speed USB device number 2")
        broken.logs("nvme nvme0: I/O 12 QID 3 timeout, aborting")
        assert "nvme0" in fault(flow, "nvme-timeout", "kernel log")["part"]
        broken.happens(1, 48)
        assert fault(flow, "gpu-memory-double-bit", "GPU driver events")["part"].startswith("GPU 0000:")
        assert fault(flow, "nic-link-down", "interface counters")["part"] == "eth1", "the first look has been taken"
        broken.write(f"{NIC}/statistics/rx_crc_errors", "65")
        os.kill(flow.pid(generation=3), signal.SIGKILL)
        counter_increases = flow.wait("node.counter-increases", over=3)["counter_increases"]
        assert counter_increases == {"network.nics[eth0].counters.rx_crc_errors": 60}
        assert fault(flow, "nic-errors", "interface counters")["part"] == "eth0"
        _kill_listener(first)
        assert mentions(flow.wait("node.gpu-events-lost")["why"], "SIGKILL")
        broken.happens(0, 79)
        assert fault(flow, "gpu-off-bus", "GPU driver events"), "another one listens"
        _kill_listener(first)
        assert [one["event"] for one in flow.events].count("node.gpu-events-lost") == 1, "once is enough"
        wait_until(lambda: not [pid for pid in children_of(first) if state_of(pid) == "Z"], seconds=60)  # of three looks and two listeners
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: broken.lookout() not in {None, first}, seconds=60)
        flow.start(4)  # the agent takes the helper's end for nobody else's
        flow.wait("worker.hello", generation=4)
    faults = [one for one in flow.events if one["event"] == "node.fault" and one["source"] == "kernel log on node"]
    assert [one["kind"] for one in faults] == ["nvme-timeout"], "a device that came is no fault"


def test_a_line_about_a_link_is_reported_with_what_the_kernel_says_of_it(broken: Broken) -> None:
    """Contradicted while the counter stands still, which hides no later line; once it has moved, the measurement agrees."""
    with broken.node.flow().attach(0) as flow:
        flow.prepare(broken.node, [sys.executable, broken.node.script(SLEEPER)], watch=True)
        flow.start(3)
        fault(flow, "nic-link-down", "interface counters")  # the first sample has been taken, and is to be older than the line
        time.sleep(BEFORE)
        broken.logs("igb eth0: igb: eth0 NIC Link is Down")
        first = fault(flow, "link-down", "kernel log")
        assert (first["part"], "supported" in first) == ("eth0", False)
        assert "eth0 did not lose its link" in first["contradicted"]
        broken.write(f"{NIC}/carrier_down_count", "2")
        broken.logs("igb eth0: igb: eth0 NIC Link is Down")
        flow.until(lambda: [one for one in flow.events if "supported" in one], "the line that the kernel agrees with")
    lines = [one for one in flow.events if one["event"] == "node.fault" and one["source"] == "kernel log on node"]
    assert [one.get("contradicted", "")[:7] for one in lines] == ["by its ", ""]
    assert mentions(lines[1]["supported"], "eth0 lost its link once")


@pytest.mark.long
def test_a_line_about_a_disk_without_anything_of_the_job_is_about_an_idle_one(broken: Broken) -> None:
    """Once it was seen without a request for a while; one that a rank has open is not idle. Each line is followed by a sample."""
    disks = [f"sd{chr(ord('a') + number)}" for number in range(26)]
    for number, disk in enumerate(disks):
        broken.write(f"sys/class/block/{disk}/dev", f"8:{16 * number}")
        broken.write(f"sys/class/block/{disk}/stat", "9 0 0 0 5 0 0 0 0 0 0")
    used = broken.root / "scratch"
    broken.write("scratch/shard", "tokens")
    mounts = {"/": "9:9", str(used): "8:400"}
    lines = [f"{number} 1 {device} / {path} rw - ext4 none rw" for number, (path, device) in enumerate(mounts.items())]
    broken.write("proc/self/mountinfo", "\n".join(lines))
    script = f"kept = open({str(used / 'shard')!r}); {SLEEPER}"

    def reported(disk: str) -> Message:
        broken.logs(f"sd 2:0:0:0: [{disk}] tag#3 FAILED Result: hostbyte=DID_NO_CONNECT driverbyte=DRIVER_OK cmd_age=0s")
        flow.until(lambda: [one for one in flow.events if one.get("part") == disk], disk)
        return next(one for one in flow.events if one.get("part") == disk)

    with broken.node.flow().attach(0) as flow:
        flow.prepare(broken.node, [sys.executable, broken.node.script(script)], watch=True)
        flow.start(3)
        flow.wait("worker.hello")
        fault(flow, "nic-link-down", "interface counters")  # the first sample has been taken
        others = iter(disks[:25])
        assert not reported(next(others))["idle"], "nothing is known of the time before"

        def is_idle() -> bool:
            time.sleep(1.0)
            return bool(reported(next(others))["idle"])

        wait_until(is_idle, seconds=60)
        assert not reported(disks[25])["idle"], "a rank has a file on it open"


def seen(part: str = "GPU 0", quote: str = "off the bus") -> FaultFinding:
    """Return a sighting."""
    return FaultFinding(kind="gpu-off-bus", part=part, quote=quote)


def used(_found: FaultFinding) -> bool:
    """Say that no part of the node is unused."""
    return False


def test_a_fault_is_reported_once_by_the_first_source() -> None:
    """Of each part; again when it was away for a look, or happens again after a while."""
    reported: list[Message] = []
    deduplicator = Deduplicator("n0", reported.append)
    assert deduplicator.happened(seen(), "kernel log", 5.0, now=0.0)
    assert not deduplicator.happened(seen(), "GPU driver events", 5.1, now=0.1)
    deduplicator.sampled([("NVML", seen()), ("NVML", seen("GPU 1"))], 6.0, now=1.0, is_unused=used)
    assert [(one["part"], one["source"]) for one in reported] == [("GPU 0", "kernel log on n0"), ("GPU 1", "NVML on n0")]
    deduplicator.sampled([("NVML", seen())], 70.0, now=65.0, is_unused=used)
    deduplicator.happened(seen(), "kernel log", 140.0, now=2 * QUIET + 20)
    assert len(reported) == 2, "it is there still"
    deduplicator.sampled([], 200.0, now=200.0, is_unused=used)
    deduplicator.happened(seen(), "kernel log", 300.0, now=300.0)
    assert len(reported) == 3


@pytest.mark.parametrize(
    ("harmless", "proof"),
    [
        (
            "Memory failure: 0x3f2c81: reserved kernel page still referenced by 1 users",
            "Memory failure: 0x3f2c81: recovery action for reserved kernel page: Failed",
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 20034, Non-fatal, Link 30 LTSSM Fault Up",
            "nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 31 LTSSM Fault Up",
        ),
        (
            "mce: [Hardware Error]: CPU 18: Machine Check Exception: 5 Bank 3: 9e00000000010091",
            "mce: [Hardware Error]: CPU 18: Machine Check Exception: 5 Bank 7: be00000001010091",
        ),
        (
            "mce: Uncorrected hardware memory error in user-access at 3f2c81000",
            "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)",
        ),
    ],
)
def test_the_line_that_proves_a_fault_is_reported_though_others_of_its_kind_were(harmless: str, proof: str) -> None:
    """To the controller too; what repeats either of them is counted, and nothing that does not prove it follows what does."""
    reported: list[Message] = []
    deduplicator, dedup, announced = Deduplicator("n0", reported.append), NodeFaultDedup(), Announcements()
    for number, text in enumerate((harmless, harmless, proof, harmless, proof)):
        found = finding_of(KernelLine(sequence=number, microseconds=number, level=3, text=text))
        assert found is not None
        deduplicator.happened(found, "kernel log", 5.0, now=float(number))
    assert [one["quote"] for one in reported] == [harmless, proof]
    events = [
        NodeFaultSeen.of(
            {"event": "node.fault", "kind": one["fault"], "seen_at": 5.0 + at, **{n: one[n] for n in ("part", "quote", "source")}}
        )
        for at, one in enumerate(reported)
    ]
    faults = [dedup.take("n0", event) for event in events]
    assert [fault is not None and fault.is_proven for fault in faults] == [False, True]
    assert [announced.is_new(fault, "n0", 1.0) for fault in (*faults, *faults) if fault is not None] == [True, True, False, False]


def test_a_measured_value_is_reported_though_a_line_of_its_kind_was() -> None:
    """The line alone proves nothing, and the counter does."""
    reported: list[Message] = []
    deduplicator = Deduplicator("n0", reported.append)
    told = FaultFinding(kind="memory-uncorrected", part="node", quote="mce: Uncorrected hardware memory error in user-access at 3f2c81000")
    deduplicator.happened(told, "kernel log", 5.0, now=0.0)
    deduplicator.sampled([("host check", replace(told, quote="mc0: 1 uncorrected error"))], 5.5, now=0.5, is_unused=used)
    assert [one["source"] for one in reported] == ["kernel log on n0", "host check on n0"]


def test_reports_that_were_not_sent_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The log of the monitor has their number once they are over."""
    deduplicator = Deduplicator("n0", list[Message]().append)
    with caplog.at_level(logging.INFO, "holdfast.agent.monitor"):
        for number in range(41):
            deduplicator.happened(seen(), "kernel log", 5.0, now=number / 10)
        deduplicator.sampled([], 50.0, now=50.0, is_unused=used)
        assert not caplog.records
        deduplicator.sampled([], 70.0, now=70.0, is_unused=used)
    assert [record.facts for record in caplog.records] == [{"kind": "gpu-off-bus", "part": "GPU 0", "times": 40}]  # type: ignore[attr-defined]


def test_a_flooded_log_is_judged_as_far_as_the_budget_goes() -> None:
    """The rest of the second is passed over; the next second is judged again."""
    budget = EventBudget()
    assert sum(budget.allows(0.5) for _ in range(3 * MAX_LINES)) == MAX_LINES
    assert budget.skipped == 2 * MAX_LINES
    assert budget.allows(1.6)


def test_a_log_that_is_a_file_is_followed_into_the_next_one(tmp_path: Path) -> None:
    """Plain lines, as a syslog daemon writes them, and across the daemon's own putting aside."""
    path, received = tmp_path / "kern.log", list[str]()
    path.write_text("Nov 21 10:00:00 n0 kernel: before\n")
    log = KernelLogFollower(path)
    log.subscribe(lambda line: received.append(line.text))
    with path.open("a") as file:
        file.write("Nov 21 10:00:01 n0 kernel: " + OFF_BUS + "\n")
    log.read()
    path.rename(tmp_path / "kern.log.1")
    path.write_text("Nov 21 10:00:02 n0 kernel: in the next\n")
    with selectors.DefaultSelector() as selector:
        log.register(selector)
        assert log.due() is not None, "such a file cannot be waited for"
        log.tick(1e9)
        log.tick(2e9)
    assert received == ["Nov 21 10:00:01 n0 kernel: " + OFF_BUS, "Nov 21 10:00:02 n0 kernel: in the next"]
