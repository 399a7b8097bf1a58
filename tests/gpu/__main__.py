"""`make gpu`: run everything in this folder on one card, within ten minutes, and print one table; logs are kept in build/gpu.

Status 0: nothing failed, or there is no card, which the only line of output says; 1: a test failed, or not all of them ended in time.
A test that takes its process down is reported as failed, and the tests after it run in another process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import torch

from tests.gpu.record import NOT_RUN, RECORD, UNFINISHED, Outcome, outcomes

ROOT: Final = Path(__file__).resolve().parents[2]
PLACE: Final = ROOT / "build" / "gpu"
SECONDS: Final = 600.0
WITHOUT_A_CARD: Final = "not cpu and not stand-in and not gloo"
"""Leaves out the variants that need no card: `make test` runs them."""
KEPT_LINES: Final = 60


def missing() -> str | None:
    """Return what this machine lacks to run the tests on a card; None where it lacks nothing."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install one that has it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU here (`nvidia-smi` says why, CUDA_VISIBLE_DEVICES may hide it)"
    return not_shared(_asked("compute_mode"))


def not_shared(mode: str) -> str | None:
    """Return why several processes cannot use a card in this compute *mode* of the driver's; None where they can."""
    if mode in {"Exclusive_Process", "Prohibited"}:
        return f"the card's compute mode is {mode}, and the ranks share it: set it by `nvidia-smi -c DEFAULT`"
    return None


def versions() -> dict[str, str]:
    """Return the card and the versions that results depend on."""
    driver = _asked("driver_version")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"card": torch.cuda.get_device_name(0), "driver": driver, "torch": str(torch.__version__), "NCCL": nccl}


def _asked(field: str) -> str:
    """Return what the driver says of the card."""
    asked = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", f"--id={_card()}"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


def table(found: Sequence[Outcome], facts: Mapping[str, str]) -> str:
    """Return the table that `make gpu` prints."""
    width = max((len(one.name) for one in found), default=4)
    lines = [", ".join(f"{name} {value}" for name, value in facts.items())]
    lines += [f"{one.outcome:8}{one.name:{width}}{one.seconds:8.1f} s  {one.why}".rstrip() for one in found]
    counts = {name: sum(one.outcome == name for one in found) for name in ("passed", "failed", "skipped", NOT_RUN)}
    return "\n".join([*lines, ", ".join(f"{count} {name}" for name, count in counts.items() if count or name != NOT_RUN)])


def run(command: Sequence[str], folder: Path, output: IO[str], seconds: float, *, where: Path = ROOT) -> dict[str, Outcome]:
    """Run *command*, a pytest with the hooks of `record`, until each test has an outcome, for at most so many *seconds*.

    Whatever ends a pytest early, the test that ran then has failed, and the next pytest runs those after it. Record and files of the tests
    go to *folder*.
    """
    record, deadline, failed = folder / "record.jsonl", time.monotonic() + seconds, dict[str, Outcome]()
    while True:
        done = [f"--deselect={test}" for test, one in outcomes(record).items() if one.outcome != NOT_RUN]
        status = _pytest([*command, f"--basetemp={folder / str(len(failed))}", *done], record, output, deadline - time.monotonic(), where)
        found = outcomes(record) | failed
        how = "it did not end in time" if status is None else f"its process ended with status {status}"
        early = {test: one._replace(outcome="failed", why=how) for test, one in found.items() if one.outcome == UNFINISHED}
        failed |= early
        if not early or status is None:
            return found | failed


def _pytest(command: Sequence[str], record: Path, output: IO[str], seconds: float, where: Path) -> int | None:
    """Run *command* in a session of its own, and end all that is left of it; return its status, None where it ran out of time."""
    environment = {"NCCL_DEBUG": "WARN", **os.environ, RECORD: str(record), "CUDA_VISIBLE_DEVICES": _card(), "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, cwd=where, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return child.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _card() -> str:
    """Return the first card that this process may use: all ranks share it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def keep_logs(folder: Path, place: Path) -> None:
    """Copy the logs of ranks, and the record, from *folder* to *place*."""
    for path in (*folder.rglob("*.log"), *folder.glob("*.jsonl")):
        to = place / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)


def main(arguments: Sequence[str]) -> int:
    """Run the tests and print the table; return the status."""
    lacks = missing()
    if lacks is not None:
        print(f"make gpu: nothing was run: {lacks}")
        return 0
    PLACE.mkdir(parents=True, exist_ok=True)
    log, ranks = PLACE / "pytest.log", PLACE / "ranks"
    shutil.rmtree(ranks, ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-n0", "-m", "gpu", "-k", WITHOUT_A_CARD, "-rs", "tests/gpu", *arguments]
    with log.open("w") as output, tempfile.TemporaryDirectory(prefix="hf-gpu-", ignore_cleanup_errors=True) as folder:
        found = run(command, Path(folder), output, SECONDS)  # in a folder with a short name: there are sockets in it
        keep_logs(Path(folder), ranks)
    if not found:
        print(f"make gpu: no test has begun; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-KEPT_LINES:]))
        return 1
    text = table(list(found.values()), versions())
    (PLACE / "table.txt").write_text(text + "\n")
    print(f"{text}\nlogs: {log}, and those of the ranks in {ranks}")
    return 1 if any(one.outcome in {"failed", NOT_RUN} for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
