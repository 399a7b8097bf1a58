"""Data parallelism whose step has one batch, shared out among whatever ranks there are: each writes down which samples it computed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from tests.runtime.chaos import gate, reach

folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])

torch.set_num_threads(1)
holdfast.join()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
source = torch.Generator().manual_seed(5)
dataset = TensorDataset(torch.arange(100), torch.randn(100, 8, generator=source), torch.randn(100, 4, generator=source))
workers = 2 if "workers" in options else 0
order = torch.Generator().manual_seed(3)
loader = holdfast.Loader(DataLoader(dataset, 16, shuffle=True, generator=order, drop_last=True, num_workers=workers))

with holdfast.session(model=model, optimizer=optimizer, data=loader, any_rank=True) as session:
    wrapped = session.stabilize_ddp(nn.parallel.DistributedDataParallel(model))
    for step in session.steps(until=until):
        for one in options:
            if one == f"gate-{step.number}":
                gate(folder, one)
        reach("forward", step.number)
        computed: list[list[int]] = []
        mean = torch.zeros(())
        for share in session.micro_batches():
            samples, inputs, wanted = share.batch
            loss = nn.functional.mse_loss(wrapped(inputs), wanted) * share.weight
            loss.backward()
            mean += loss.detach()
            computed.append(samples.tolist() if share.weight else [])
        reach("backward", step.number)
        dist.all_reduce(mean)
        optimizer.step()
        reach("applied", step.number)
        optimizer.zero_grad()
        step.end(mean / dist.get_world_size())
        if session.steps_done == step.number:  # it counts
            with (folder / f"samples-{os.getpid()}").open("a") as file:
                file.write(json.dumps([step.number, computed]) + "\n")

results = {"step": session.steps_done, "weights": [value.tolist() for value in model.parameters()]}
(folder / f"result-{session.rank}.json").write_text(json.dumps(results))
