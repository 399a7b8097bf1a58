"""Four ranks of DDP on fewer cores, in blocks of steps for which they are released, so that jobs of several kinds can take turns.

Run by `benchmarks.saturated`: with ``--plain`` under torchrun and without Holdfast, else with managed groups and a session.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 (its usual name)

import holdfast

Training = tuple[Callable[[], None], Callable[[], dict[str, Any]], Callable[[bool], None]]
"""What ends a step, what reports snapshots, and what turns them on or off."""
LOOK: float = 0.05
"""Seconds between two looks whether it is this job's turn."""


def network(width: int) -> nn.Module:
    """Return three layers of *width* by *width*: some ten million parameters with 1,800."""
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())), nn.Linear(width, 1))


@contextmanager
def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Training]:
    """Train as a script does that knows nothing of Holdfast."""
    del model

    def end() -> None:
        optimizer.step()
        optimizer.zero_grad()

    yield end, dict, lambda _on: None


@contextmanager
def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Training]:
    """Train in a session: with snapshots where there is a memory store."""
    with holdfast.session(model=model, optimizer=optimizer) as session:
        steps = iter(session.steps())
        present = next(steps)

        def end() -> None:
            nonlocal present
            optimizer.step()
            optimizer.zero_grad()
            present.end()
            present = next(steps)

        def stats() -> dict[str, Any]:
            snapshotter = session._snapshotter  # noqa: SLF001 (what a user sees in `holdfast status`)
            if snapshotter is None:
                return {}
            found, counts = snapshotter.planning.overhead.measured, snapshotter.counts
            measured = None if found is None else {"share": found.share, "error": found.error, "cycles": found.cycles}
            facts = {"every": snapshotter.every, "control": snapshotter.control, "taken": counts.taken, "size": counts.size}
            return {**facts, "measured": measured, "slowed": counts.slowed, "trained": counts.trained, "copied": counts.copied}

        def switch(on: bool) -> None:  # noqa: FBT001 (all there is to say)
            if session._snapshotter is not None:  # noqa: SLF001 (what a user never does)
                session._snapshotter.enabled = on  # noqa: SLF001

        yield end, stats, switch


def main() -> None:
    """Train a block whenever it is this job's turn; write how long its steps took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--width", type=int, default=1800)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--block", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if given.plain:
        dist.init_process_group("gloo")
    else:
        holdfast.join()
    rank = dist.get_rank()
    model = DDP(network(given.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(given.rows, given.width)
    with (plain if given.plain else kept)(model, optimizer) as (end, stats, switch), (given.place / f"rank-{rank}.jsonl").open("w") as out:
        for number in range(1, 1_000_000):
            while not (given.place / f"go-{number}").exists():
                if (given.place / "end").exists():
                    os._exit(0)  # what the job leaves is of no use to anybody
                time.sleep(LOOK)
            switch((given.place / f"go-{number}").read_text() != "off")
            dist.barrier()
            ends, used = [time.perf_counter()], time.process_time()
            for _ in range(given.block):
                model(batch).square().mean().backward()
                end()
                ends.append(time.perf_counter())
            steps = [after - before for before, after in pairwise(ends)]
            print(json.dumps({"steps": steps, "cpu": time.process_time() - used, **stats()}), file=out, flush=True)


if __name__ == "__main__":
    main()
