"""Processors, memory, clock, processes and services: trees of a test's own, and this machine's."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.health import judge
from holdfast.detectors.nodes.readings import ClockReading, HostReading, NodeReading, ServiceState
from holdfast.host.process import state_of
from holdfast.probe.readers.host import read_clock, read_host
from holdfast.probe.readers.services import HOST_PID_NAMESPACE, read_processes, read_services, sees_all_processes
from tests.waiting import wait_until

Tree = Callable[[dict[str, str]], Path]

HOST = {
    "proc/sys/kernel/random/boot_id": "b1\n",
    "proc/uptime": "5000.25 9000.00\n",
    "proc/loadavg": "1.00 2.50 3.00 1/100 4242\n",
    "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    600 kB\n",
    "proc/vmstat": "nr_free_pages 5\noom_kill 3\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=1.50 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.75 avg300=0.00 total=4\n",
    "proc/sys/fs/file-nr": "100\t0\t1000\n",
    "sys/devices/system/cpu/online": "0-3,8\n",
    "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "2\n",
    "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "3\n",
    "sys/devices/system/edac/mc/mc0/ce_count": "4\n",
    "sys/devices/system/edac/mc/mc1/ce_count": "1\n",
    "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc hpet \n",
}


def look(host: HostReading, at: float = 0.0) -> NodeReading:
    """Return a reading with only the host part of a node."""
    return NodeReading(node="n0", at=at, host=host)


def test_a_host_is_read_in_the_units_that_its_fields_have(tree: Tree) -> None:
    """And has no fault."""
    host = read_host(tree(HOST))
    assert (host.boot, host.uptime, host.load_5m, host.processors) == ("b1", 5000.25, 2.5, 5)
    assert (host.memory_total, host.memory_available, host.oom_kills) == (1_024_000, 614_400, 3)
    assert (host.throttled, host.memory_errors_corrected, host.memory_errors_uncorrected) == (5, 5, 0)
    assert (host.files_open, host.files_most, host.clock_sources) == (100, 1000, ("tsc", "hpet"))
    assert not isinstance(host.memory_pressure, Unknown)
    assert (host.memory_pressure.some_60s, host.memory_pressure.full_60s) == (1.5, 0.75)
    assert judge(look(host)) == []


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        ("proc/sys/kernel/random/boot_id", "b2", "node-rebooted"),
        ("proc/vmstat", "oom_kill 4", "host-oom-kill"),
        ("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 10 kB", "memory-pressure"),
        ("proc/pressure/memory", "some avg10=0 avg60=90.00 x\nfull avg10=0 avg60=80.00 x", "memory-pressure"),
        ("proc/loadavg", "1 50 1 1/1 1", "host-overloaded"),
        ("proc/sys/fs/file-nr", "990 0 1000", "files-exhausted"),
        ("sys/devices/system/edac/mc/mc0/ue_count", "1", "memory-ecc-uncorrectable"),
        ("sys/devices/system/edac/mc/mc0/ce_count", "900", "memory-ecc-corrected"),
        ("sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", "9000", "cpu-throttled"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet", "clock-source-slow"),
    ],
)
def test_each_changed_file_becomes_its_fault(tree: Tree, file: str, text: str, kind: str) -> None:
    """One file is another an hour later; that fault is seen and no other."""
    before = look(read_host(tree(HOST)))
    (fault,) = judge(look(read_host(tree({**HOST, file: text})), at=3600.0), before)
    assert fault.kind == kind


def test_counters_of_another_boot_are_not_compared(tree: Tree) -> None:
    """They were reset; only that is reported."""
    before = look(read_host(tree(HOST)))
    after = {**HOST, "proc/sys/kernel/random/boot_id": "b2", "proc/vmstat": "oom_kill 900"}
    assert [fault.kind for fault in judge(look(read_host(tree(after)), at=60.0), before)] == ["node-rebooted"]


def test_an_invalid_or_missing_file_is_unknown(tree: Tree, tmp_path: Path) -> None:
    """Each file in turn is nonsense, then all are missing."""
    for file in HOST:
        host = read_host(tree({**HOST, file: "no\0nsense"}))
        assert isinstance(host, HostReading)
    dark = read_host(tmp_path / "missing")
    assert all(isinstance(getattr(dark, field.name), Unknown) for field in dataclasses.fields(dark))
    assert judge(look(dark)) == []


def test_this_machine_is_read() -> None:
    """Against what Python itself knows of it."""
    host = read_host()
    assert host.memory_total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert isinstance(host.uptime, float)
    assert 0 < host.uptime <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_the_clock_is_read_and_not_set() -> None:
    """This machine's, whatever keeps it."""
    clock = read_clock()
    assert isinstance(clock, ClockReading | Unknown)
    if isinstance(clock, ClockReading):
        assert abs(clock.offset) <= 0.5  # the kernel takes no more
        assert clock.worst >= 0


def test_a_zombie_is_found() -> None:
    """A real zombie, and no longer once its parent has taken note; seen by its place after the test's own process."""
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        (zombie,) = (one for one in read_processes().stuck if one.pid == child.pid)
        assert (zombie.state, zombie.parent, zombie.name) == ("Z", os.getpid(), "true")
    assert not [one for one in read_processes().stuck if one.pid == child.pid]


def is_zombie(pid: int) -> bool:
    """Return whether the process has ended and was not reaped."""
    return state_of(pid) == "Z"


def test_a_zombie_of_holdfasts_own_processes_is_no_fault_of_the_node() -> None:
    """The parent decides: a process that is started as `python -m holdfast.agent...`, whatever its child was."""
    code = "import os, time\npid = os.fork()\nif pid == 0: os._exit(0)\nprint(pid, flush=True)\ntime.sleep(60)"
    for marks, seen in ([], True), (["-m", "holdfast.agent.monitor"], False):
        with subprocess.Popen([sys.executable, "-c", code, *marks], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout
            pid = int(parent.stdout.readline())
            wait_until(partial(is_zombie, pid), seconds=60)
            assert (pid in {one.pid for one in read_processes().stuck}) is seen
            parent.kill()


WAITS = "#include <unistd.h>\nint main(void) { if (!vfork()) { pause(); _exit(0); } return 0; }\n"
"""Waits for its child as the kernel has it after vfork: deaf to all signals but SIGKILL, in state D."""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[int]:
    """Give a real process that waits in the kernel."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for a process that waits in the kernel")
    (tmp_path / "waits.c").write_text(WAITS)
    subprocess.run([compiler, "-w", "-o", tmp_path / "waits", tmp_path / "waits.c"], check=True)
    with subprocess.Popen([tmp_path / "waits"], start_new_session=True) as child:
        yield child.pid
        os.killpg(child.pid, signal.SIGKILL)


def waits(pid: int) -> bool:
    """Say whether a process is seen to wait in the kernel."""
    return any((one.pid, one.state) == (pid, "D") for one in read_processes().stuck)


def test_a_process_that_waits_in_the_kernel_is_found_by_two_readings(waiting: int) -> None:
    """A real one: a single reading cannot distinguish it from a process that waits for a disk for a moment."""
    wait_until(lambda: waits(waiting), seconds=60)
    before, now = (NodeReading(node="n0", at=at, processes=read_processes()) for at in (0.0, 0.0))
    assert judge(before) == []
    faults = {fault.signature for fault in judge(now, before) if fault.kind == "process-stuck"}
    assert f"process-stuck process {waiting}" in faults


def a_process(root: Path, pid: int, name: str, state: str = "S") -> None:
    """Put a process into a tree."""
    place = root / "proc" / str(pid)
    place.mkdir(parents=True)
    (place / "stat").write_text(f"{pid} ({name}) {state} 1 " + " ".join(["0"] * 17) + " 100 0")


def test_names_with_blanks_and_brackets_are_read(tree: Tree) -> None:
    """A process may be called anything."""
    root = tree({"proc/uptime": "50 1"})
    a_process(root, 10, "a) b (c", "D")
    (stuck,) = read_processes(root).stuck
    assert (stuck.name, stuck.state, stuck.age) == ("a) b (c", "D", 50.0 - 100 / os.sysconf("SC_CLK_TCK"))
    assert isinstance(stuck.wait, Unknown)


SWITCH = {"sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de", "sys/bus/pci/devices/0000:05:00.0/class": "0x068000"}


def the_service(root: Path, name: str) -> ServiceState | None:
    """Return one service of a tree."""
    return next((service for service in read_services(root).services if service.name == name), None)


def test_a_service_is_needed_by_hardware_or_by_systemd(tree: Tree) -> None:
    """An NVSwitch needs the fabric manager; a service that is only installed is not needed."""
    root = tree({**SWITCH, "usr/bin/nvidia-persistenced": "", "usr/sbin/sshd": ""})
    (root / "etc/systemd/system/multi-user.target.wants").mkdir(parents=True)
    (root / "etc/systemd/system/multi-user.target.wants/ssh.service").symlink_to("/lib/systemd/system/ssh.service")
    a_process(root, 10, "sshd")
    assert not [one for one in read_services(root).services if one.name == "sshd" and one.needed], (
        "systemd did not begin this node's processes: its units mean nothing"
    )
    (root / "run/systemd/system").mkdir(parents=True)
    needed = {service.name: service.needed for service in read_services(root).services}
    assert needed == {"fabric manager": True, "nvidia-persistenced": False, "sshd": True}
    ssh = the_service(root, "sshd")
    assert ssh is not None
    assert ssh.running is True


def test_a_service_that_cannot_be_seen_from_a_container_is_unknown(tree: Tree) -> None:
    """It may well run on the node around it: no fault."""
    root = tree(SWITCH)
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").touch()
    fabric = the_service(root, "fabric manager")
    assert fabric is not None
    assert isinstance(fabric.running, Unknown)
    assert judge(NodeReading(node="n0", at=0.0, services=read_services(root))) == []


def test_it_is_known_whether_all_processes_are_visible() -> None:
    """As the kernel numbers its namespaces."""
    assert sees_all_processes(Path("/")) is (Path("/proc/self/ns/pid").stat().st_ino == HOST_PID_NAMESPACE)
