"""Plain data parallelism under DDP, with everything that must not be lost: dropout, a scheduler, a shuffled position in the data.

Options, among others: ``on=KIND`` (see `RankDevice`), ``compile=BACKEND`` (train what torch.compile makes of the model), ``own`` (each
rank reports its own loss, not that of all).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.runtime.chaos import gate, reach
from tests.runtime.rank_device import RankDevice

folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])
width = next((int(one.partition("=")[2]) for one in options if one.startswith("width=")), 32)

where = RankDevice(options)
if "init" in options:
    dist.init_process_group("gloo")
else:
    holdfast.join()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))
model.to(where.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
torch.manual_seed(100 + rank)
source = torch.Generator().manual_seed(5)
dataset = TensorDataset(torch.randn(160, 8, generator=source), torch.randn(160, 4, generator=source))
loader = holdfast.Loader(DataLoader(dataset, 8, sampler=DistributedSampler(dataset, ranks, rank, seed=3), drop_last=True))

with holdfast.session(model=model, optimizer=optimizer, schedulers=scheduler, data=loader, any_rank="any" in options) as session:
    wrapped = session.stabilize_ddp(nn.parallel.DistributedDataParallel(model, process_group=session.group))
    compiler = next((one.partition("=")[2] for one in options if one.startswith("compile=")), "")
    forward = torch.compile(wrapped, backend=compiler) if compiler else wrapped
    batches = iter(loader)
    for step in session.steps(until=until):
        if f"gate={step.number}" in options:
            gate(folder)
        if f"gate-{step.number}" in options:
            gate(folder, f"gate-{step.number}")
        reach("forward", step.number)
        inputs, wanted = (one.to(where.device) for one in next(batches))
        loss = nn.functional.mse_loss(forward(inputs), wanted)
        loss.backward()
        reach("backward", step.number)
        reported = loss.detach().clone()
        if not options & {"late", "own"}:
            dist.all_reduce(reported)
        optimizer.step()
        reach("applied", step.number)
        optimizer.zero_grad()
        scheduler.step()
        if "late" in options:
            dist.all_reduce(reported)
        step.end(reported / ranks)
        reach("committed", session.steps_done)

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().cpu().numpy().tobytes())
applied = {int(state["step"]) for state in optimizer.state.values()}
ending = {"step": session.steps_done, "loss": session.loss, "model": digest.hexdigest(), "applied": sorted(applied)}
(folder / f"result-{session.rank}.json").write_text(json.dumps(ending))
