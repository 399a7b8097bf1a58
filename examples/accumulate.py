"""Train a small network with a DataLoader of its own, and with gradients that are accumulated over several batches of each step.

Run it with `holdfast run examples/accumulate.yaml`, under `torchrun`, or alone.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast


def main() -> None:
    """Learn to add sines; a step is one call of the optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulate", type=int, default=4, help="batches of a step, on each rank")
    given = parser.parse_args()
    torch.manual_seed(1)
    if "RANK" not in os.environ:  # alone
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.rand(4096, 8)
    dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    loader = holdfast.Loader(DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset)))

    with holdfast.session(model=model, optimizer=optimizer, data=loader, any_rank=True) as session:
        parallel = session.stabilize_ddp(DistributedDataParallel(model))
        batches = iter(loader)
        for step in session.steps(until=given.steps):
            total = torch.zeros(())
            for part in range(given.accumulate):
                inputs, targets = next(batches)
                with nullcontext() if part == given.accumulate - 1 else parallel.no_sync():  # DDP averages the gradients once
                    loss = nn.functional.mse_loss(parallel(inputs), targets) / given.accumulate
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            step.end(total)
            if session.rank == 0 and session.steps_done == step.number and step.number % 10 == 0:
                print(f"step {step.number}: loss {session.loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
