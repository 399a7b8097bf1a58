"""Images through a network whose tensors have unusual memory layouts: `channels_last`, transposed, expanded.

Options: ``on=KIND`` (see `RankDevice`), ``fused`` (AdamW in one kernel).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.runtime.chaos import reach
from tests.runtime.rank_device import RankDevice

folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])


class Net(nn.Module):
    """Convolutions, a weight that is the transpose of what lies in memory, and a buffer of one number in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(8, 4, 3))
        self.turned = nn.Parameter(torch.randn(5, 64).t())
        self.register_buffer("scale", torch.full((1,), 0.5).expand(5))

    def forward(self, images: Tensor) -> Tensor:
        """Pass *images* on."""
        out: Tensor = self.images(images).flatten(1) @ self.turned * self.scale
        return out


where = RankDevice(options)
holdfast.join()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1)
with where.device:
    model = Net()
model.images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["scale"])  # torch cannot broadcast into it
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused="fused" in options)
torch.manual_seed(100 + rank)

with holdfast.session(model=model, optimizer=optimizer) as session:
    wrapped = session.stabilize_ddp(DistributedDataParallel(model, process_group=session.group))
    for step in session.steps(until=until):
        loss = wrapped(torch.randn(4, 3, 8, 8, device=where.device).to(memory_format=torch.channels_last)).square().mean()
        loss.backward()
        reach("backward", step.number)
        reported = loss.detach().clone()
        dist.all_reduce(reported)
        optimizer.step()
        reach("applied", step.number)
        optimizer.zero_grad()
        step.end(reported / ranks)

digest = hashlib.sha256()
strides = []
for value in [*model.state_dict().values(), *(value for state in optimizer.state.values() for value in state.values())]:
    digest.update(value.contiguous().cpu().numpy().tobytes())
    strides.append(value.stride())
(folder / f"result-{rank}.json").write_text(json.dumps({"step": session.steps_done, "state": digest.hexdigest(), "strides": strides}))
