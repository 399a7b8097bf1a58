"""Two ranks that train by turns over a managed group and over a backend of torch's own, in the same processes: for benchmarks/gpu.py.

    train_beside_stock.py FOLDER UNTIL DEVICE PORT ROUNDS SECONDS

A turn is `STEPS` steps, and ends when the device has done them: within a turn torch's own way waits for nothing, and a managed step waits
for the device before its vote. Both have the same model, work, and number of bytes to reduce. Each rank writes ``result-N.json``: seconds
per step of each turn, by ``managed`` and ``stock``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast
from tests.gpu.one_card import settings

STEPS: Final = 5
WIDTH: Final = 1024
LAYERS: Final = 8


def settle(device: torch.device) -> float:
    """Wait for the device; return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Training:
    """A model, its optimizer, and work of about *seconds* for each step."""

    def __init__(self, device: torch.device, works: int) -> None:
        torch.manual_seed(1)
        with device:
            self.model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
            self.inputs, self.factor = torch.randn(32, WIDTH), torch.randn(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.works = works

    def step(self, reduce: Any) -> Tensor:  # noqa: ANN401 (a group, or a backend of torch's)
        """Compute a step, and have *reduce* sum its gradients in one operation."""
        for _ in range(self.works):
            torch.mm(self.factor, self.factor)
        loss: Tensor = self.model(self.inputs).square().mean()
        loss.backward()
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        flat = torch.cat([one.view(-1) for one in gradients])
        reduce.allreduce([flat], dist.AllreduceOptions()).wait()
        for one, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            one.copy_(summed.view_as(one))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def works_for(device: torch.device, seconds: float) -> int:
    """Return how many products of matrices take so many *seconds* on this rank's share of the device."""
    factor = torch.randn(WIDTH, WIDTH, device=device)
    torch.mm(factor, factor)
    begin = settle(device)
    for _ in range(20):
        torch.mm(factor, factor)
    return max(1, round(20 * seconds / (settle(device) - begin)))


def torchs_own(port: int, rank: int, kind: str) -> Any:  # noqa: ANN401 (a gloo or an NCCL backend)
    """Connect both ranks by torch alone."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    if kind == "cuda":
        return dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(minutes=5))


def main() -> None:
    """Train by turns."""
    folder, kind, port, rounds, seconds = Path(sys.argv[1]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
    torch.set_num_threads(1)
    device, rank = torch.device(kind, 0) if kind == "cuda" else torch.device(kind), int(os.environ["RANK"])
    if kind == "cuda":
        os.environ.update(settings(os.getpid(), tuple(torch.cuda.nccl.version())))
    holdfast.join()
    stock = torchs_own(port, rank, kind)
    found: dict[str, list[float]] = {"managed": [], "stock": []}
    works = torch.tensor(works_for(device, seconds))
    dist.broadcast(works, 0)
    ours, theirs = (Training(device, int(works)) for _ in range(2))
    with holdfast.session(model=ours.model, optimizer=ours.optimizer) as session:
        steps, group = session.steps(until=(rounds + 1) * STEPS), dist.group.WORLD
        for _ in range(rounds + 1):
            begin = settle(device)
            for _ in range(STEPS):
                step = next(steps)
                step.end(ours.step(group))
            middle = settle(device)
            for _ in range(STEPS):
                theirs.step(stock)
            found["managed"].append((middle - begin) / STEPS)
            found["stock"].append((settle(device) - middle) / STEPS)
        next(steps, None)  # the session ends with its last step
    (folder / f"result-{rank}.json").write_text(json.dumps({name: values[1:] for name, values in found.items()}))


if __name__ == "__main__":
    main()
