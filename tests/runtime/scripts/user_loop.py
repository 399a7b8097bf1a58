"""A loop over epochs that the script writes itself: accumulation, dropout, a scheduler, and an evaluation after each epoch.

Options: ``stock`` groups; ``plain``: a DataLoader that the session does not know, whose done batches the script skips itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.runtime.chaos import gate, reach

folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])
PARTS, BATCHES = 2, 8
epochs = until * PARTS // BATCHES

torch.set_num_threads(1)
if "stock" not in options:
    holdfast.join()
else:
    dist.init_process_group("gloo")
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
torch.manual_seed(100 + rank)
source = torch.Generator().manual_seed(5)
size = 4 * BATCHES * ranks
dataset = TensorDataset(torch.randn(size, 8, generator=source), torch.randn(size, 4, generator=source))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, ranks, rank, seed=3)
unseeded = torch.Generator() if "plain" in options else None  # so that a new iterator draws nothing from the generators of the session
loader = DataLoader(dataset, 4, sampler=sampler, generator=unseeded)
data = None if "plain" in options else holdfast.Loader(loader, endless=False)
evaluated: list[int] = []
counted = 0

wrapped = nn.parallel.DistributedDataParallel(model)

with holdfast.session(model=model, optimizer=optimizer, schedulers=scheduler, data=data).start(until=until) as session:
    session.stabilize_ddp(wrapped)
    for epoch in range(session.steps_done * PARTS // BATCHES if data is None else data.epoch, epochs):
        sampler.set_epoch(epoch)
        done = session.steps_done * PARTS - epoch * BATCHES if data is None else data.consumed
        batches = itertools.islice(loader, done, None) if data is None else data
        for number, (inputs, wanted) in enumerate(batches, done + 1):
            step = session.steps_done + 1
            last = (number if data is None else data.consumed) % PARTS == 0
            for name in [one for one in options if one == f"gate-{step}"]:
                gate(folder, name)
            reach("forward" if last else "first part", step)
            with nullcontext() if last else wrapped.no_sync():
                loss = nn.functional.mse_loss(wrapped(inputs), wanted) / PARTS
                loss.backward()
            if not last:
                continue
            reach("backward", step)
            reported = loss.detach().clone()
            dist.all_reduce(reported)
            optimizer.step()
            reach("applied", step)
            optimizer.zero_grad()
            scheduler.step()
            counted += session.step(reported / ranks)
            reach("committed", session.steps_done)
        if epoch != 1:
            torch.rand(1)  # an evaluation that draws random numbers
        if "HOLDFAST_HOT_SPARE" not in os.environ:
            evaluated.append(epoch)

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
applied = {int(state["step"]) for state in optimizer.state.values()}
ending = {"step": session.steps_done, "loss": session.loss, "model": digest.hexdigest(), "applied": sorted(applied)}
(folder / f"result-{session.rank}.json").write_text(json.dumps({**ending, "random": torch.rand(2).tolist()}))
(folder / f"epochs-{session.rank}.json").write_text(json.dumps({"evaluated": evaluated, "counted": counted}))
