"""An out-of-memory kill is distinguished from any other SIGKILL by the kernel's own words, or by the cgroup's counter."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.agent.monitor.kernel_log import KernelLogFollower
from holdfast.agent.workers import oom as memory
from holdfast.agent.workers.oom import OomDetector
from tests.agent.rig import CLIENT, Node
from tests.mentions import mentions
from tests.waiting import wait_until

SLEEPER = CLIENT + "hello(); time.sleep(600)"
EATER = "import os\nkeep = []\nwhile True:\n    keep.append(bytearray(os.urandom(1 << 20)))\n"


def killed_line(pid: int) -> str:
    """Return what the kernel says of such a kill."""
    return f"Out of memory: Killed process {pid} (python) total-vm:1000kB, anon-rss:900kB, file-rss:0kB, UID:0 oom_score_adj:0"


@pytest.mark.parametrize(
    "line",
    [
        "Out of memory: Killed process {} (python) total-vm:8000kB, anon-rss:4000kB",
        "6,1234,5678,-;Out of memory: Killed process {} (python) total-vm:8000kB, anon-rss:4000kB",
        "3,99,12,-,caller=T7;Memory cgroup out of memory: Killed process {} (python3.11) total-vm:8000kB",
        "Out of memory: Kill process {} (python) score 900 or sacrifice child",
        "Memory cgroup out of memory: Kill process {} (my; script) score 1 or sacrifice child",
    ],
)
def test_the_kernels_log_line_names_the_process(tmp_path: Path, line: str) -> None:
    """Of today's kernels and of older ones; as records of /dev/kmsg and as plain lines."""
    log = tmp_path / "kmsg"
    log.write_text(line.format(7) + "\n")
    oom = OomDetector(KernelLogFollower(log))
    assert oom.killed(7) is None, "it is from before"
    with log.open("a") as file:
        file.write("6,1,1,-;usb 1-1: new device\n" + line.format(4242) + "\n SUBSYSTEM=x\n" + line.format(4243)[:30])
    assert oom.killed(4241) is None
    assert oom.killed(4242) == line.format(4242).partition("-;" if "-;" in line else "T7;")[2] or line.format(4242)
    with log.open("a") as file:
        file.write(line.format(4243)[30:] + "\n")
    assert oom.killed(4243), "a line may come in two halves"
    oom.reset()
    assert oom.killed(4243) is None, "a pid may be used again"


def test_without_any_evidence_blind_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not seen is not the same as not so."""
    monkeypatch.setattr(memory, "_cgroup_counter", lambda: None)
    oom = OomDetector(KernelLogFollower(tmp_path / "missing"))
    assert oom.killed(1) is None
    assert mentions(oom.blind or "", f"{tmp_path}/missing", "cgroup")


def test_the_counter_counts_once_for_each_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the log cannot be read, or speaks of other pids than ours."""
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 3\n")
    monkeypatch.setattr(memory, "_cgroup_counter", lambda: counter)
    oom = OomDetector(KernelLogFollower(tmp_path / "missing"))
    assert (oom.killed(1), oom.blind) == (None, None)
    counter.write_text("low 0\noom 5\noom_kill 5\n")
    assert [bool(oom.killed(pid)) for pid in (1, 2, 3)] == [True, True, False]
    monkeypatch.setattr(memory, "_log_has_our_pids", lambda: False)
    (tmp_path / "kmsg").touch()
    elsewhere = OomDetector(KernelLogFollower(tmp_path / "kmsg"))
    counter.write_text("oom_kill 6\n")
    assert "rose to 6" in str(elsewhere.killed(9))


def test_a_kill_in_another_process_is_not_attributed_to_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of one machine share a cgroup; where the log names our pids, the counter is not asked."""
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 0\n")
    (tmp_path / "kmsg").touch()
    monkeypatch.setattr(memory, "_cgroup_counter", lambda: counter)
    monkeypatch.setattr(memory, "_log_has_our_pids", lambda: True)
    oom = OomDetector(KernelLogFollower(tmp_path / "kmsg"))
    counter.write_text("oom_kill 1\n")
    assert oom.killed(5) is None


def test_an_oom_killed_worker_is_reported_with_the_kernels_line(new_node: Node) -> None:
    """One that was killed by somebody ends without."""
    log = new_node.work / "kernel.log"
    log.write_text("")
    new_node.begin("--kernel-log", str(log))
    with new_node.flow().attach(0) as flow:
        flow.prepare(new_node, [sys.executable, new_node.script(SLEEPER)])
        flow.start(1, (0, 1))
        for rank in (0, 1):
            flow.wait("worker.hello", rank=rank)
        log.write_text(killed_line(flow.pid(0)) + "\n")
        for rank in (0, 1):
            os.kill(flow.pid(rank), signal.SIGKILL)
        assert flow.exited(0)["oom"] == killed_line(flow.pid(0))
        assert (flow.exited(1)["oom"], flow.exited(1)["oom_blind"] is None) == (None, memory._log_has_our_pids())


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK) or not memory._log_has_our_pids(), reason="needs the kernel's log")
def test_the_real_kernel_log_is_followed(new_node: Node) -> None:
    """What is written there by root reads like the kernel's own."""
    new_node.begin("--kernel-log", "/dev/kmsg")
    with new_node.flow().attach(0) as flow:
        flow.prepare(new_node, [sys.executable, new_node.script(SLEEPER)])
        flow.start(1)
        flow.wait("worker.hello")
        with Path("/dev/kmsg").open("w") as log:
            log.write(killed_line(flow.pid()) + "\n")
        os.kill(flow.pid(), signal.SIGKILL)
        assert flow.exited()["oom"] == killed_line(flow.pid())


def memory_groups() -> tuple[Path, str] | None:
    """Return where memory cgroups are made and which of their files holds the limit, in version 1 or 2."""
    if Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists():
        return Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    with suppress(OSError):
        if "memory" in Path("/sys/fs/cgroup/cgroup.subtree_control").read_text().split():
            return Path("/sys/fs/cgroup"), "memory.max"
    return None


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """Give a cgroup of 64 MiB."""
    groups = memory_groups()
    if groups is None or not os.access(groups[0], os.W_OK):
        pytest.skip("no memory cgroup can be made")
    group = groups[0] / f"holdfast-test-{os.getpid()}-{tmp_path.name}"
    group.mkdir()
    (group / groups[1]).write_text(str(64 << 20))
    yield group
    wait_until(lambda: removed(group), seconds=60)


def removed(group: Path) -> bool:
    """Remove a cgroup; it is busy as long as the last process in it is not quite gone."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.parametrize("log", ["/dev/kmsg", "/missing"])
def test_a_real_kill_by_the_kernel_is_seen(small_memory: Path, new_node: Node, log: str) -> None:
    """By its line in the log, and where that cannot be read by the counter of the agent's cgroup."""
    into = ("/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(small_memory))
    new_node.begin("--kernel-log", log, through=into)
    with new_node.flow().attach(0) as flow:
        flow.prepare(new_node, [sys.executable, new_node.script(EATER)])
        flow.start(1)
        end = flow.exited()
        assert end["signal"] == signal.SIGKILL
        said = "oom_kill counter rose to 1" if log == "/missing" else f"Memory cgroup out of memory: Killed process {flow.pid()} (python"
        assert said in (end["oom"] or ""), end
    new_node.end()
