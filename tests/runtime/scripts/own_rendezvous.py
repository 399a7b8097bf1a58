"""Trains over a process group that finds its ranks by a file, which Holdfast cannot repair; with a session."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with holdfast.session(model=model, optimizer=optimizer) as session:
    for step in session.steps(until=3):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        step.end(loss)
(folder / f"told-{rank}.json").write_text(json.dumps({"kind": type(dist.group.WORLD).__name__, "step": session.step}))
dist.destroy_process_group()
