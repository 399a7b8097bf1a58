"""Copies of one model whose data has a sample that is no number: it spoils the parameters for good."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--bad", type=int)
parser.add_argument("--pace", type=float, default=0.05)
parser.add_argument("--skip", help="steps that are done without their batches")
parser.add_argument("--result", type=Path)
given = parser.parse_args()
if given.skip:
    os.environ["HOLDFAST_SKIP_STEPS"] = given.skip

torch.manual_seed(1)
torch.set_num_threads(1)
model = nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
samples = torch.randn(1000, 8)
samples[2 * given.bad] = torch.nan
loader = holdfast.Loader(DataLoader(TensorDataset(samples, torch.randn(1000, 4)), 2))
with holdfast.session(model=model, optimizer=optimizer, data=loader) as session:
    wrapped = session.stabilize_ddp(DistributedDataParallel(model))
    batches = iter(loader)
    for step in session.steps(until=given.steps):
        x, y = next(batches)
        loss = (wrapped(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(given.pace)
        step.end(loss)
if session.rank == 0:
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()
    given.result.write_text(json.dumps([session.steps_done, session.loss, loader.consumed, digest]))
