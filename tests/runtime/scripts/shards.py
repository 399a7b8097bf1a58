"""Every rank trains a shard of its own, under its own name, as the stages of a pipeline do; only the loss is common."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests.runtime.chaos import reach

folder, until = Path(sys.argv[1]), int(sys.argv[2])

torch.set_num_threads(1)
holdfast.join()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(rank)
model = nn.ModuleDict({f"stage{rank}": nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with holdfast.session(model=model, optimizer=optimizer) as session:
    for step in session.steps(until=until):
        loss = model[f"stage{rank}"](torch.randn(4, 8)).square().mean()
        loss.backward()
        reach("backward", step.number)
        reported = loss.detach().clone()
        dist.all_reduce(reported)
        optimizer.step()
        optimizer.zero_grad()
        step.end(reported / ranks)

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
(folder / f"result-{rank}.json").write_text(json.dumps({"step": session.steps_done, "model": digest.hexdigest()}))
