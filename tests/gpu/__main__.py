"""`make gpu`: run everything in this folder on one card, within ten minutes, and print one table; logs are kept in build/gpu.

Status 0: nothing failed, or there is no card, which the only line of output says; 1: a test failed, or not all of them ended in time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

ROOT: Final = Path(__file__).resolve().parents[2]
PLACE: Final = ROOT / "build" / "gpu"
SECONDS: Final = 600


class Outcome(NamedTuple):
    """What became of one test, and why where it did not pass."""

    name: str
    outcome: str
    seconds: float
    why: str


def missing() -> str | None:
    """Return what this machine lacks to run the tests on a card; None where it lacks nothing."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install one that has it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU here (`nvidia-smi` says why, CUDA_VISIBLE_DEVICES may hide it)"
    return None


def versions() -> dict[str, str]:
    """Return the card and the versions that results depend on."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"unknown ({type(error).__name__})"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"card": torch.cuda.get_device_name(0), "driver": driver, "torch": str(torch.__version__), "NCCL": nccl}


def outcomes(report: Path) -> list[Outcome]:
    """Return the outcome of each test in a JUnit *report*."""
    found = []
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 (pytest wrote it just now)
        first = next((child for child in case if child.tag in {"failure", "error", "skipped"}), None)
        outcome = "passed" if first is None else "skipped" if first.tag == "skipped" else "failed"
        why = "" if first is None else (first.get("message") or "").splitlines()[0][:100]
        found.append(
            Outcome(f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name')}", outcome, float(case.get("time") or 0), why)
        )
    return found


def table(found: Sequence[Outcome], facts: dict[str, str]) -> str:
    """Return the table that `make gpu` prints."""
    width = max((len(one.name) for one in found), default=4)
    lines = [", ".join(f"{name} {value}" for name, value in facts.items())]
    lines += [f"{one.outcome:8}{one.name:{width}}{one.seconds:8.1f} s  {one.why}".rstrip() for one in found]
    counts = {name: sum(one.outcome == name for one in found) for name in ("passed", "failed", "skipped")}
    return "\n".join([*lines, ", ".join(f"{count} {name}" for name, count in counts.items())])


def main(arguments: Sequence[str]) -> int:
    """Run the tests and print the table; return the status."""
    lacks = missing()
    if lacks is not None:
        print(f"make gpu: nothing was run: {lacks}")
        return 0
    PLACE.mkdir(parents=True, exist_ok=True)
    report, log = PLACE / "results.xml", PLACE / "pytest.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-n0", "-m", "gpu", "-rs", "tests/gpu", f"--junitxml={report}", *arguments]
    late = False
    with log.open("w") as output:
        try:
            status = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "NCCL_DEBUG": "WARN"},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status, late = 1, True
    if not report.exists():
        print(f"make gpu: the tests did not end{f' within {SECONDS} s' if late else ''}: {log} has what they printed")
        return 1
    text = table(outcomes(report), versions())
    (PLACE / "table.txt").write_text(text + "\n")
    print(f"{text}\nlogs: {log}")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
