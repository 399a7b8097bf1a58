"""Run a script as it stands, with an evaluation on rank 0 and a save on all ranks that take long and that nobody declared.

python with_pauses.py SCRIPT ARGUMENTS...: before the first forward pass that follows so many optimizer steps.
"""

from __future__ import annotations

import os
import runpy
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

EVALUATION, SAVE = 12, 18
"""Optimizer steps after which they come."""
USUAL = 2.0
"""A shorter silence is never reported (seconds, `timeouts.hang_min`)."""
MOST_SECONDS, LEAST_STEPS = 20.0, 10
"""Where steps take long, as on a busy machine, a pause ends after so many seconds, but not before so many median steps."""

ends: list[float] = []
due = dict.fromkeys((EVALUATION, SAVE), True)


def count(_optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Note when a step is over."""
    ends.append(time.monotonic())


def pause(_module: nn.Module, _inputs: object) -> None:
    """Sleep when it is time: 50 median steps on rank 0, 100 on all (see `MOST_SECONDS`), and longer than what is never reported."""
    if not due.pop(len(ends), False):
        return
    steps, rank = len(ends), int(os.environ["RANK"])
    median = statistics.median(after - before for before, after in pairwise(ends))
    wanted = min((50 if steps == EVALUATION else 100) * median, max(MOST_SECONDS, LEAST_STEPS * median))
    seconds = max(wanted, 1.5 * USUAL)
    if steps == SAVE or rank == 0:
        print(f"rank {rank} pauses after {steps} steps for {seconds / median:.0f} median steps", flush=True)
        time.sleep(seconds)


if __name__ == "__main__":
    register_optimizer_step_post_hook(count)
    register_module_forward_pre_hook(pause)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
