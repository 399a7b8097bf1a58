"""The same training script under ``torchrun --max-restarts``, and the same faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from benchmarks import steps
from benchmarks.measuring import ROOT, wait_for
from benchmarks.real_job import QUIET, RANKS, SAVE_EVERY, SCRIPT, fault, steady
from holdfast.host.process import marked

TIMEOUT: Final = 10
"""Seconds that a collective waits: with torch's default a stopped rank would cost 30 minutes."""


@contextmanager
def torchrun(place: Path) -> Iterator[None]:
    """Run the script on one node, which is torchrun's best case: one agent, no second party at the rendezvous."""
    place.mkdir(parents=True)
    environment = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it torch 2.13 over gloo does not recover
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HOLDFAST_CHECKPOINT_DIR": str(place / "checkpoints"),
        "HOLDFAST_SAVE_EVERY": str(SAVE_EVERY),
        "BENCH_MARK": str(place),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    command += [str(SCRIPT), "--stock-groups", "--timeout", str(TIMEOUT)]
    with (place / "log").open("wb") as log:
        run = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        run.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            run.wait(20)
        for pid in marked("BENCH_MARK", str(place)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.kill()
        run.wait()


def round_of(place: Path, rank: int, how: str) -> dict[str, Any]:
    """Break *rank*; return how long it took until all ranks had done the first new step."""
    with torchrun(place):
        wait_for(lambda: steps.newest(steps.read(place, RANKS)) > SAVE_EVERY + QUIET, "torchrun's first steps", every=0.05)
        lines = steps.read(place, RANKS)
        pid = lines[rank][-1].pid
        at = fault(place, rank, pid, how)
        back = wait_for(lambda: steps.recovery(steps.read(place, RANKS), rank, pid), f"torchrun after a rank was {how}", every=0.05)
        return {"rank": rank, "fault": how, "seconds": back.at - at, "steps_lost": back.steps_lost, "step": steady(lines[0])}
