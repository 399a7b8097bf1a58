"""Trains with a session, but no `data` in it; with ``file`` over a group whose ranks find each other by a file, as Holdfast cannot."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests.runtime.chaos import reach

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
how: dict[str, Any] = {"init_method": f"file://{folder}/rendezvous", "rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", **(how if "file" in sys.argv else {}))
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with holdfast.session(model=model, optimizer=optimizer) as session:
    for step in session.steps(until=3):
        reach("forward", step.number)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        step.end(loss)
(folder / f"result-{rank}.json").write_text(json.dumps({"kind": type(dist.group.WORLD).__name__, "step": session.steps_done}))
dist.destroy_process_group()
