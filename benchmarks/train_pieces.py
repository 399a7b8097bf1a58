"""The training script of the benchmarks of recovery: each rank holds a piece of its own, as a stage of a pipeline does.

So no rank has a copy of another's state: what a lost one held is in the memory of nodes, or on disk. A step ends with a sum over all ranks.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from benchmarks.steps import StepNotes

WIDTH = 1024
BYTES_A_LAYER = 3 * 4 * (WIDTH * WIDTH + WIDTH)
"""Of a layer's parameters and their two moments."""


def main() -> None:
    """Train up to a step, or until killed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=300, help="state of a rank")
    parser.add_argument("--until", type=int)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds that a step takes longer, without using a core")
    given = parser.parse_args()
    holdfast.join()
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, given.megabytes * 1_000_000 // BYTES_A_LAYER))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    values, notes = torch.randn(8, WIDTH), StepNotes()
    with holdfast.session(model=model, optimizer=optimizer) as session:
        for step in session.steps(given.until):
            begin = time.perf_counter()
            time.sleep(given.sleep)
            loss = model(values).square().mean()
            loss.backward()
            together = loss.detach().clone()
            if dist.is_initialized():  # not when a rank is alone
                dist.all_reduce(together)
            optimizer.step()
            optimizer.zero_grad()
            step.end(together)
            if session.steps_done == step.number:  # not in a warm-up, and not in a step that did not count
                notes.note(session.rank, session.steps_done, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
