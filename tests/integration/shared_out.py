"""Data parallelism whose step has one batch for all ranks: each writes down what it computed of it.

    shared_out.py STEPS FOLDER [join] [gate-STEP]

Under torch's own groups, or managed ones. In front of a gate it waits for the file of that name in the folder; a file ``last-step``
there ends it after the step that it names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast

if "join" in sys.argv[3:]:
    holdfast.join()
torch.manual_seed(1)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.arange(100), torch.randn(100, 16), torch.randn(100, 4))
loader = holdfast.Loader(DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(3), drop_last=True))
folder, generation = Path(sys.argv[2]), int(os.environ.get("HOLDFAST_GENERATION", "1"))
with holdfast.session(model=model, optimizer=optimizer, data=loader) as session:
    wrapped = session.stabilize_ddp(DistributedDataParallel(model))
    for step in session.steps(until=int(sys.argv[1])):
        last = folder / "last-step"
        if last.exists() and step.number > int(last.read_text()):
            break
        while f"gate-{step.number}" in sys.argv[3:] and not (folder / f"gate-{step.number}").exists():
            time.sleep(0.01)
        computed, mean = [], torch.zeros(())
        for share in session.micro_batches():
            samples, x, y = share.batch
            loss = (wrapped(x) - y).square().mean() * share.weight
            loss.backward()
            mean += loss.detach()
            computed.append(samples.tolist())
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)  # long enough that a node is lost in the middle
        step.end(mean)
        if session.steps_done == step.number:  # it counts, and is none of a warm-up
            with (folder / f"computed-{generation}-{os.getpid()}").open("a") as out:
                out.write(json.dumps([step.number, mean.item(), computed]) + "\n")
