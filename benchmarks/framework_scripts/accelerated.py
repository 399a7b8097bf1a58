"""Accelerate, with a loop of its own."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

import holdfast  # holdfast
from benchmarks.framework_scripts.common import BATCH, STEPS, Gpt, Tokens, mark, save_weights

torch.manual_seed(1)
accelerator = Accelerator(cpu=True)
model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches: Any = DataLoader(Tokens(STEPS), batch_size=BATCH, shuffle=True)
wrapped, optimizer, batches = accelerator.prepare(model, optimizer, batches)
batches = holdfast.Loader(batches, endless=False)  # holdfast
session = holdfast.session(model=wrapped, optimizer=optimizer, data=batches).start()  # holdfast
step = session.steps_done  # holdfast: step = 0
for batch in batches:
    loss = wrapped(batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if not session.step(loss):  # holdfast
        continue  # holdfast
    step += 1
    mark(step)
session.close()  # holdfast
save_weights(model.state_dict())
accelerator.end_training()
