"""FSDP2 in two groups: parameters are sharded over two ranks, and each shard is replicated on two. No sum depends on the order of ranks.

Options: ``on=KIND`` (see `RankDevice`).
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from tests.runtime.chaos import reach
from tests.runtime.rank_device import RankDevice

folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])

where = RankDevice(options)
holdfast.join()
rank = int(os.environ["RANK"])
mesh = init_device_mesh(where.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(1)
with where.device:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
torch.manual_seed(100 + rank)

with holdfast.session(model=model, optimizer=optimizer) as session:
    for step in session.steps(until=until):
        reach("forward", step.number)
        loss = model(torch.randn(4, 8, device=where.device)).square().mean()
        loss.backward()
        reach("backward", step.number)
        reported = loss.detach().clone()
        for name in ("replicate", "shard"):
            dist.all_reduce(reported, group=mesh[name].get_group())
        optimizer.step()
        optimizer.zero_grad()
        step.end(reported / 4)

digest = hashlib.sha256()
for parameter in model.parameters():
    assert isinstance(parameter, DTensor)
    digest.update(parameter.to_local().detach().cpu().numpy().tobytes())
(folder / f"result-{rank}.json").write_text(json.dumps({"step": session.steps_done, "model": digest.hexdigest()}))
