"""An Accelerate loop with accumulation, whose steps are ended by `Session.step`; ``stock``: torch's groups, not managed ones."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from tests.runtime.chaos import gate, reach

folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])
torch.set_num_threads(1)
if "stock" not in options:
    holdfast.join()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(1)
source = torch.Generator().manual_seed(5)
# 7 batches for each of 2 ranks: the last step of an epoch has one batch only, so an epoch has 4 steps.
dataset = TensorDataset(torch.randn(56, 8, generator=source), torch.randn(56, 4, generator=source))
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
wrapped, prepared, schedule, batches = accelerator.prepare(model, optimizer, scheduler, DataLoader(dataset, 4, shuffle=True))
loader = holdfast.Loader(batches, endless=False)
torch.manual_seed(100 + int(os.environ["RANK"]))
seen: list[dict[str, object]] = []

with holdfast.session(model=wrapped, optimizer=prepared, schedulers=schedule, data=loader).start(until=until) as session:
    session.stabilize_ddp(wrapped)
    for _ in range(loader.epoch, until // 4):
        for inputs, wanted in loader:
            step = session.steps_done + 1
            for name in [one for one in options if one == f"gate-{step}"]:
                gate(folder, name)
            reach("forward", step)
            with accelerator.accumulate(wrapped):
                loss = nn.functional.mse_loss(wrapped(inputs), wanted)
                accelerator.backward(loss)
                reach("backward", step)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                    mean = accelerator.reduce(loss.detach().clone(), "mean")  # before the vote on the step
                prepared.step()
                schedule.step()
                prepared.zero_grad()
            if accelerator.sync_gradients and session.step(mean):
                indices = [dist.get_rank(), session.rank, accelerator.process_index, PartialState().process_index]
                main = [accelerator.is_main_process, accelerator.is_local_main_process]
                seen.append({"step": session.steps_done, "indices": indices, "main": main})

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
ending = {"step": session.steps_done, "model": digest.hexdigest(), "rate": schedule.get_last_lr(), "samples": len(dataset)}
(folder / f"result-{session.rank}.json").write_text(json.dumps(ending))
(folder / f"seen-{session.rank}.json").write_text(json.dumps(seen))
