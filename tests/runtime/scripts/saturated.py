"""All ranks on one core, so that a copy takes time from the computation; the state is large and a step is short.

Training ends when snapshots have become rarer, at the same step on all ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 (its usual name)

import holdfast

folder = Path(sys.argv[1])
RARER = 4
MOST = 3000

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(1)
holdfast.join()
torch.manual_seed(1)
net = nn.Linear(256, 256)
model = DDP(net)
ballast = nn.Module()
ballast.model, ballast.weight = model, nn.Parameter(torch.ones(4_000_000), requires_grad=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with holdfast.session(model=ballast, optimizer=optimizer) as session:
    snapshotter = session._snapshotter
    assert snapshotter is not None
    for step in session.steps(until=MOST):
        model(torch.randn(1024, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step.end()
        wanted = torch.tensor(float(snapshotter.planning.overhead.every))
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        if snapshotter.every >= wanted >= RARER:  # by the votes of all ranks
            break
    found = snapshotter.planning.overhead.measured
    results = {"step": step.number, "every": snapshotter.every, "taken": snapshotter.counts.taken, "slowed": snapshotter.counts.slowed}
    results |= {"share": found.share if found else 0.0, "measured": snapshotter.planning.overhead.every}
(folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(results))
