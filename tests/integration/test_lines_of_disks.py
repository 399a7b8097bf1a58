"""A rank is killed or cannot read while the kernel log has a line about a disk or about memory: what the kernel says of that part decides.

Agents, monitors, kernel logs, checks and the kill are real; sysfs and the table of mounts are files of the test's own.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.agent.monitor.line_checks import BEFORE
from holdfast.history import queries
from tests.integration.stage import BOOTED, Play, Stage
from tests.monitors import is_read
from tests.waiting import wait_until

REMOUNT = ("filesystem-read-only", "EXT4-fs (sdb1): Remounting filesystem read-only")
UNCORRECTED = ("memory-uncorrected", "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0)")
MOUNTS = "21 1 8:17 / {data} rw,relatime - ext4 /dev/sdb1 {own}\n"


def root_with_disk(root: Path, data: Path) -> None:
    """Make the /sys and /proc of nodes with one SATA disk that is mounted as writable, and one memory controller without errors."""
    for name in ("sdb", "sdb1"):
        place = root / "sys/devices/sdb" / ("sdb1" if name == "sdb1" else "")
        place.mkdir(parents=True)
        (place / "dev").write_text("8:17\n" if name == "sdb1" else "8:16\n")
        (place / "stat").write_text("9 0 0 0 5 0 0 0 0 0 0\n")
        (root / "sys/class/block").mkdir(parents=True, exist_ok=True)
        (root / "sys/class/block" / name).symlink_to(place)
    (root / "sys/devices/sdb/sdb1/partition").write_text("1\n")
    (root / "sys/devices/system/edac/mc/mc0").mkdir(parents=True)
    (root / "sys/devices/system/edac/mc/mc0/ue_count").write_text("0\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(MOUNTS.format(data=data, own="rw"))
    (root / "dev").symlink_to("/dev")


def line_of(play: Play, kind: str) -> dict[str, str]:
    """Return the evidence of the line; empty before it is on record."""
    found = [one for one in queries.faults(play.stage.history, play.job.id) if one.kind == kind and "kernel log" in one.evidence["source"]]
    return found[0].evidence if found else {}


@pytest.fixture
def logs(stage: Stage, tmp_path: Path) -> dict[str, Path]:
    """Give the nodes kernel logs and a root of the test's own."""
    root_with_disk(tmp_path / "root", tmp_path)
    found = {node: tmp_path / f"{node}.log" for node in ("node-0", "node-1", "node-2")}
    for log in found.values():
        log.write_text(BOOTED)
    stage.environment |= {"HOLDFAST_NODE_ROOT": str(tmp_path / "root"), "HOLDFAST_KERNEL_LOG": str(tmp_path / "{node}.log")}
    return found


def begun(stage: Stage, name: str, logs: dict[str, Path], each: str = "") -> Play:
    """Return a job that trains on two nodes and has a spare one, with a first reading of node-1 that is older than any line."""
    args = ["--steps", "4000", *(["--each", each] if each else [])]
    play = stage.play(name, args=args, nnodes=2, nproc_per_node=1, spare_nodes=1)
    play.reaches("RUNNING")
    wait_until(lambda: is_read(logs["node-1"], "node-1"), seconds=60, explain=play.log)
    monitor = stage.nodes.folder("node-1") / "monitor.log"
    wait_until(lambda: "volumes.read" in monitor.read_text(), seconds=60, explain=play.log)
    time.sleep(BEFORE)  # the first reading is to be older than the line
    return play


def write(log: Path, text: str) -> None:
    """Have the kernel of node-1 log a line."""
    with log.open("a") as file:
        file.write(f"Nov 21 09:10:00 n1 kernel: {text}\n")


@pytest.mark.parametrize("true", [False, True], ids=["repeated", "counted"])
def test_the_counter_of_memory_errors_decides_whether_a_line_explains_a_kill(
    stage: Stage, tmp_path: Path, logs: dict[str, Path], *, true: bool
) -> None:
    """A line that the kernel has not counted leaves the kill the cause, and its node in the job."""
    play = begun(stage, f"memory-{'counted' if true else 'repeated'}", logs)
    if true:
        (tmp_path / "root/sys/devices/system/edac/mc/mc0/ue_count").write_text("1\n")
    kind, text = UNCORRECTED
    write(logs["node-1"], text)
    wait_until(lambda: line_of(play, kind), seconds=60, explain=play.log)
    os.kill(play.pids()[1], signal.SIGKILL)
    wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=60, explain=play.log)
    (incident,) = play.incidents()
    expected = (kind, "replace-node") if true else ("worker-sigkill", "restart-workers")
    assert (incident.kind, incident.action, incident.outcome) == (*expected, "recovered"), play.log()
    assert (bool(line_of(play, kind).get("supported")), bool(line_of(play, kind).get("contradicted"))) == (true, not true)
    assert ("node-1" in queries.generations(stage.history, play.job.id)[-1].ranks) == (not true)
    play.stops()


@pytest.mark.long
@pytest.mark.parametrize("true", [False, True], ids=["writable", "read-only"])
def test_the_table_of_mounts_decides_whether_a_line_explains_a_failed_read(
    stage: Stage, tmp_path: Path, logs: dict[str, Path], *, true: bool
) -> None:
    """A rank that cannot read from elsewhere confirms no line about a file system that is mounted as writable."""
    cut = tmp_path / "cut"
    failing = f"if rank == 1 and generation == 1 and os.path.exists({str(cut)!r}): raise OSError(5, 'Input/output error', '/data/tokens')"
    play = begun(stage, f"mount-{'read-only' if true else 'writable'}", logs, failing)
    if true:
        (tmp_path / "root/proc/self/mountinfo").write_text(MOUNTS.format(data=tmp_path, own="ro,errors=remount-ro"))
    kind, text = REMOUNT
    write(logs["node-1"], text)
    wait_until(lambda: line_of(play, kind), seconds=60, explain=play.log)
    cut.touch()
    wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=60, explain=play.log)
    (incident,) = play.incidents()
    expected = (kind, "replace-node") if true else ("worker-storage-failed", "restart-workers")
    assert (incident.kind, incident.action, incident.outcome) == (*expected, "recovered"), play.log()
    assert line_of(play, kind).get("supported", "").endswith("became read-only") == true
    assert line_of(play, kind).get("contradicted", "").endswith("is mounted and writable") == (not true)
    assert ("node-1" in queries.generations(stage.history, play.job.id)[-1].ranks) == (not true)
    play.stops()
