"""Copies of one model under torch's own groups: what a session keeps without `holdfast.join`."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast

pace = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02  # long enough that a kill lands in the middle

torch.manual_seed(1)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.BatchNorm1d(32), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
decay = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 4))
loader = holdfast.Loader(DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(3)))
with holdfast.session(model=model, optimizer=optimizer, schedulers=decay, data=loader, extra={"seen": 0}) as session:
    wrapped = session.stabilize_ddp(DistributedDataParallel(model))
    batches = iter(loader)
    for step in session.steps(until=int(sys.argv[1])):
        x, y = next(batches)
        loss = (wrapped(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        session.extra["seen"] += 1
        time.sleep(pace)
        step.end(loss)
if session.rank == 0:
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()
    Path(sys.argv[2]).write_text(json.dumps([session.steps_done, session.loss, session.extra["seen"], digest]))
