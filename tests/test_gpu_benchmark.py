"""`python -m benchmarks.gpu` on the CPU: keys are written as they come, and what goes wrong with one costs no other its result."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import GOALS, PARTS, RECOVERIES, SHM, SNAPSHOTS, read, results, run_apart
from benchmarks.measuring import ROOT
from tests.mentions import mentions

WRITE = """
import json, os, signal, sys, time
record = open(sys.argv[1], "a")
def say(**line): print(json.dumps(line), file=record, flush=True)
def hang():
    open(sys.argv[1] + '-hangs', 'w').close()
    time.sleep(600)
"""
PARTS_THAT_END = {
    "well": ("say(key='managed_groups_overhead', value=0.001, step=0.25)", ()),
    "by an exception": ("say(reason='RuntimeError: no snapshot was taken'); sys.exit(1)", ("no snapshot was taken",)),
    "for want of room in /dev/shm": ("os.kill(os.getpid(), signal.SIGBUS)", ("SIGBUS",)),
    "in the middle of a line": ('record.write(\'{"key": "man\'); record.flush(); os._exit(3)', ("status 3",)),
    "too late": ("say(key='managed_groups_overhead', value=0.001, step=0.25); hang()", ("out of time",)),
    "never by itself": ("signal.signal(signal.SIGTERM, signal.SIG_IGN); hang()", ("out of time",)),
}


@pytest.mark.parametrize("how", PARTS_THAT_END)
def test_a_part_says_why_it_lacks_values_however_it_ends(tmp_path: Path, how: str) -> None:
    """What it had measured until then counts, and what it leaves in shared memory is removed."""
    statements, why = PARTS_THAT_END[how]
    late = "out of time" in why
    leaves = f"left = os.path.join({SHM!r}, f'hf-gpu-{{os.getpid()}}-x'); os.mkdir(left); open(sys.argv[1] + '-left', 'w').write(left)\n"
    for seconds in (2, 10, 60) if late else (60,):  # as many as it takes to begin, on a machine that does other work too
        record, begin = tmp_path / f"record-{seconds}.jsonl", time.monotonic()
        said = run_apart([sys.executable, "-c", WRITE + leaves + statements, str(record)], record, float(seconds), grace=1.0)
        if Path(f"{record}-hangs").exists():
            break
    assert time.monotonic() - begin < 300
    assert mentions(said, *why, *([f"{seconds} s"] if late else [])) if why else not said
    assert not Path(Path(f"{record}-left").read_text()).exists()
    entry = results(read(record), {}, "H200", {"driver": "580.1"})["managed_groups_overhead"]
    measured = how in {"well", "too late"}
    assert (entry["median"], entry["n"], entry["met"]) == ((0.001, 1, True) if measured else (None, 0, None))
    assert (entry["device"], entry["versions"]) == ("H200", {"driver": "580.1"})


def test_each_goal_is_measured_in_one_part() -> None:
    """A key that no part measures would never have values."""
    assert sorted(key for part in PARTS for key in part) == sorted(GOALS)


def test_a_part_that_dies_costs_no_other_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written after each part has the values so far, and says of each other key why it has none."""
    lines = [
        '{"key": "managed_groups_overhead", "value": 0.5, "step": 1.0}\n{"key": "manag',
        '{"key": "snapshot_overhead", "value": 0.2, "step": null}\n{"reason": "OSError: full"}\n',
        '{"key": "fault_to_first_step_2_ranks", "value": 0.4, "step": 0.1}\n',
    ]
    whys, shown = iter(["its process ended with signal 7 (SIGBUS)", "OSError: full", ""]), list[tuple[set[str], dict[str, str]]]()

    def die(_command: Sequence[str], record: Path, _seconds: float) -> str:
        record.write_text(lines.pop(0))
        return next(whys)

    monkeypatch.setattr(gpu, "run_apart", die)
    only = [key for key in GOALS if key != "fault_to_first_step_4_ranks"]
    arguments = argparse.Namespace(limit=100.0, only=only, device="cpu", gigabytes=1.0, seconds=1.0, rounds=1)
    complete = gpu.measure_all(
        arguments, lambda found, reasons: shown.append(({one["key"] for one in found if "key" in one}, dict(reasons)))
    )
    assert not complete
    assert [len(keys) for keys, _ in shown] == [0, 1, 2, 3]
    assert shown[-1][1] == {
        "fault_to_first_step_4_ranks": "not asked for",
        "managed_groups_overhead": "its process ended with signal 7 (SIGBUS)",
        **dict.fromkeys(SNAPSHOTS, "OSError: full"),
    }
    assert shown[1][1]["snapshot_overhead"] == "not measured yet"


def benchmark(place: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the benchmark on the CPU; return its status and what it has written."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(place / "gpu.json"), *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    written: dict[str, Any] = json.loads((place / "gpu.json").read_text())
    assert json.loads(ended.stdout) == written, ended.stderr
    return ended.returncode, written


@pytest.mark.timeout(300)
def test_snapshots_are_measured_on_the_cpu(tmp_path: Path) -> None:
    """With the version that the values depend on; no goal is met without a card."""
    status, found = benchmark(tmp_path, "--gigabytes", "0.002", "--seconds", "0.005", "--only", *SNAPSHOTS)
    assert status == 0
    assert all(found[key]["n"] and "reason" not in found[key] for key in SNAPSHOTS), found
    assert {found[key].get("reason") for key in GOALS.keys() - set(SNAPSHOTS)} == {"not asked for"}
    assert all(one["met"] is None and one["device"] is None and one["versions"]["torch"] for one in found.values())


def test_what_there_was_no_time_for_says_so(tmp_path: Path) -> None:
    """Every key is there, whichever was being measured."""
    status, found = benchmark(tmp_path, "--limit", "2")
    assert status == 1
    assert found.keys() == GOALS.keys()
    assert all(one["n"] == 0 and mentions(one["reason"], "out of time") for one in found.values()), found
    assert RECOVERIES.keys() <= found.keys()
