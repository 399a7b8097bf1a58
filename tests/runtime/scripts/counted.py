"""A loss divided by a count that only the last rank contributes: with no peer and no recording that is 0 / 0, which the script refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests.runtime.chaos import gate, reach

folder, until = Path(sys.argv[1]), int(sys.argv[2])

torch.set_num_threads(1)
holdfast.join()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

with holdfast.session(model=model, optimizer=optimizer, any_rank=True) as session:
    wrapped = session.stabilize_ddp(nn.parallel.DistributedDataParallel(model, process_group=session.group))
    for step in session.steps(until=until):
        if step.number == 8:
            gate(folder)
        reach("forward", step.number)
        count = torch.tensor(8.0 if session.rank == ranks - 1 else 0.0)
        dist.all_reduce(count)
        if step.number == 9:
            dist.all_reduce(torch.ones(7))  # what no warm-up meets
        loss = (wrapped(torch.ones(4, 8)).sum() * 0) / count
        if not torch.isfinite(loss) and ("strict" in sys.argv or os.environ.get("HOLDFAST_HOT_SPARE")):
            raise ValueError(f"the loss is {loss.item()}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.end(loss)
