"""A reading of a complete node: by a program that needs no package, within a deadline, whatever a source does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.detectors.codec import MalformedData, packed, unpacked
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.health import judge, unknown_signals
from holdfast.detectors.nodes.readings import (
    ClockReading,
    Disk,
    HostReading,
    KernelReading,
    NetworkReading,
    NodeReading,
    ProcessReading,
    ServiceReading,
    StorageReading,
)
from holdfast.probe.readers.local import program, read_node, reading_of, sources
from holdfast.probe.remote.bundle import BOOT
from tests.mentions import mentions

PARTS = [field.name for field in dataclasses.fields(NodeReading) if field.name not in {"node", "at"}]


def test_all_parts_of_this_node_are_read() -> None:
    """Every part has a value or a reason, and a reading survives its encoding as text."""
    reading = read_node("n7")
    assert reading.node == "n7"
    for name, kind in (("network", NetworkReading), ("storage", StorageReading), ("host", HostReading), ("processes", ProcessReading)):
        assert isinstance(getattr(reading, name), kind)
    assert isinstance(reading.services, ServiceReading)
    assert isinstance(reading.kernel, KernelReading | Unknown)
    assert isinstance(reading.clock, ClockReading | Unknown)
    assert unpacked(NodeReading, json.loads(json.dumps(packed(reading)))) == reading
    assert all(why for _where, why in unknown_signals(reading))
    judge(reading, reading)


def test_the_program_needs_no_package(tmp_path: Path) -> None:
    """An interpreter without packages and without our folder runs it, from a folder with modules of the same names."""
    for name in ("json", "holdfast", "pynvml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a trap')")
    asked = [sys.executable, "-S", "-I", "-c", BOOT]
    text = f"{len(program().encode())}\n{program()}" + json.dumps({"mark": "m", "node": "n1", "seconds": 10.0}) + "\n"
    done = subprocess.run(asked, input=text, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("m "), done.stderr
    reading = reading_of(json.loads(done.stdout.removeprefix("m ")))
    assert isinstance(reading, NodeReading), reading
    assert isinstance(reading.host, HostReading), done.stderr
    gpus = packed(reading.gpus)
    assert "not installed" not in str(gpus), "pynvml travels with the program"


def test_the_program_carries_the_readers_and_what_they_need() -> None:
    """Neither the catalogue nor the command line."""
    carried = set(sources()) - {"pynvml"}
    assert {"holdfast.detectors.nodes.readings", "holdfast.probe.readers.collect", "holdfast.probe.readers.gpus"} <= carried
    assert all(name.startswith(("holdfast.probe.readers.", "holdfast.detectors.")) for name in carried)
    assert not carried & {"holdfast.detectors.catalogue", "holdfast.probe.readers.local"}


GATHER = """
import json, os, sys, time
from holdfast.probe.readers.collect import run_in_children
kept, other = os.pipe()
jobs = {
    "quick": lambda: 5,
    "hangs": lambda: os.read(kept, 1),
    "raises": lambda: 1 // 0,
    "refused": lambda: open("/nowhere/at/all"),
    "dies": lambda: os._exit(3),
    "prints": lambda: print("noise") or 6,
}
for seconds in (1.0, 5.0, 30.0):  # as many as the others take, on a machine that does other work too
    answers = run_in_children(jobs, time.monotonic() + seconds, "too late")
    if [job for job, answer in answers.items() if answer == {"blind": "too late"}] == ["hangs"]:
        break
print(json.dumps(answers))
"""


def test_a_source_that_hangs_or_breaks_affects_only_itself() -> None:
    """One hangs, one raises, one is refused, one is killed, one writes to the standard output; the others are read."""
    done = subprocess.run(
        [sys.executable, "-c", GATHER], cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True, check=True
    )
    answers = json.loads(done.stdout)
    assert answers["quick"] == 5
    assert answers["prints"] == 6
    assert answers["hangs"] == {"blind": "too late"}
    assert "ZeroDivisionError" in answers["raises"]["blind"]
    assert answers["refused"] == {"blind": "/nowhere/at/all: No such file or directory"}
    assert mentions(answers["dies"]["blind"], "exited")


GATHER_LATE = """
import json, os, time
from holdfast.probe.readers import collect
start = collect._start
def begin(name, job):
    child = start(name, job)
    if name != "hangs":
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child
collect._start = begin
kept, other = os.pipe()
jobs = {"quick": lambda: 5, "hangs": lambda: os.read(kept, 1)}
print(json.dumps(collect.run_in_children(jobs, time.monotonic() - 1.0, "too late")))
"""


def test_an_answer_that_has_arrived_is_not_late() -> None:
    """A process that was stopped past the deadline, or got no processor until then, finds it when it goes on."""
    done = subprocess.run(
        [sys.executable, "-c", GATHER_LATE], cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"quick": 5, "hangs": {"blind": "too late"}}


def test_a_file_that_hangs_does_not_affect_the_others(tmp_path: Path) -> None:
    """A FIFO in place of a file of the kernel blocks its reader; the probe still ends at its deadline."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("1 1 8:1 / / rw - xfs /dev/sda1 rw\n")
    (tmp_path / "sys/block/sda").mkdir(parents=True)
    (tmp_path / "sys/block/sda/ro").write_text("0")
    (tmp_path / "proc/uptime").write_text("5 5")
    os.mkfifo(tmp_path / "proc/meminfo")
    for seconds in (1, 5, 30):  # as many as the others take, on a machine that does other work too
        reading = read_node("n0", seconds=float(seconds), root=tmp_path)
        if isinstance(reading.storage, StorageReading):
            break
    assert reading.host == Unknown(f"no answer within {seconds} s")
    assert isinstance(reading.storage, StorageReading)
    assert reading.storage.disks == (
        Disk(name="sda", read_only=False, counters=Unknown(f"{tmp_path}/sys/block/sda/stat: No such file or directory")),
    )


@pytest.mark.parametrize(
    ("python", "why"),
    [("/nowhere/python3", "No such file or directory"), ("/bin/false", "gave no answer"), ("/bin/echo", "gave no answer")],
)
def test_a_node_that_cannot_run_the_program_is_unknown_with_the_reason(python: str, why: str) -> None:
    """No interpreter, one that fails, one that prints something else."""
    reading = read_node("n0", python=python)
    dark = [getattr(reading, name) for name in PARTS]
    assert all(isinstance(part, Unknown) and why in part.why for part in dark)
    assert judge(reading) == []


def test_an_interpreter_that_is_too_old_is_reported_with_its_version() -> None:
    """The check itself runs on versions that cannot run the readers."""
    old = "import sys\nsys.version_info = (3, 8, 10, 'final', 0)\n"
    done = subprocess.run([sys.executable, "-I", "-"], input=old + program(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert mentions(done.stderr, "python3", "3.8", "3.10")


@pytest.mark.parametrize(
    "answer",
    [[], 5, {"node": 5, "at": 0}, {"node": "n0"}, {"node": "n0", "at": 0, "host": []}, {"node": "n0", "at": "x"}, {"blind": 5}],
)
def test_a_malformed_answer_is_unknown(answer: object) -> None:
    """A node's answer is used only in the expected format."""
    assert isinstance(reading_of(answer), Unknown)


def test_unknown_fields_are_ignored() -> None:
    """A newer program may send more."""
    newer = {"node": "n0", "at": 5, "humidity": 40, "clock": {"synchronized": True, "offset": 0, "worst": 0.5, "moon": 1}}
    assert unpacked(NodeReading, newer).clock == ClockReading(synchronized=True, offset=0.0, worst=0.5)
    with pytest.raises(MalformedData, match=r"clock\.synchronized"):
        unpacked(NodeReading, {**newer, "clock": {"synchronized": 1, "offset": 0, "worst": 0}})


def test_a_reading_has_the_nodes_own_time() -> None:
    """The caller can compute how far the node's clock is off."""
    before = time.time()
    reading = read_node("n0")
    assert before <= reading.at <= time.time()
