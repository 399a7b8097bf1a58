"""A common training script without Holdfast: DDP, and its own checkpoint by torch.save.

Run it by `torchrun --nproc-per-node 2 examples/plain_ddp.py --steps 200`, or by `holdfast run examples/plain_ddp.yaml`:
then it survives faults by resuming from its own checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Learn to add sines, and save every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, default=Path("plain_ddp.pt"))
    given = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    first = 1
    if given.checkpoint.exists():
        saved = torch.load(given.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
        print(f"rank {rank}: resumed after step {saved['step']}", flush=True)

    for step in range(first, given.steps + 1):
        numbers = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.rand(256, 4, generator=numbers)
        loss = nn.functional.mse_loss(parallel(x), x.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % given.save_every == 0 or step == given.steps):
            temporary = given.checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
            temporary.replace(given.checkpoint)
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    dist.barrier()
    # In torch 2.13 gloo's thread frees the barrier shortly after its end, and needs the interpreter lock for that. Destroying the group
    # before then waits for that thread while holding the lock: a deadlock.
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
