"""Train the byte-level GPT of byte_gpt.py with FSDP2: parameters, gradients and optimizer state are sharded over the ranks.

- `torchrun --nproc-per-node 4 examples/fsdp2.py --steps 50`: four shards
- `torchrun --nproc-per-node 4 examples/fsdp2.py --steps 50 --replicate 2`: two shards, each on two ranks (HSDP)
- `holdfast run examples/fsdp2.yaml`: the second of these under Holdfast, which handles faults

With copies of each shard a lost rank receives its state from the other rank that has it. Without, no other rank has its shard, and
all ranks go back to the newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from byte_gpt import ByteGPT, Windows, decayed, fingerprint, library_text, mean_over_ranks  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, RandomSampler

import holdfast


def mesh_of(replicas: int) -> DeviceMesh:
    """Return the ranks as one row of shards, or as *replicas* rows."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def sharded(model: ByteGPT, mesh: DeviceMesh) -> nn.Module:
    """Shard *model* over *mesh*, block by block."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wrapped: nn.Module = model
    return wrapped


def fingerprint_of_all(model: nn.Module, full_model: ByteGPT) -> str:
    """Return the SHA-256 of the parameters, gathered from all shards into the model *full_model*."""
    values = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()}
    full_model.load_state_dict(values)
    return str(fingerprint(full_model))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--replicate", type=int, default=1, metavar="COPIES", help="ranks that hold each shard")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="maximum bytes of text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS", help="steps between two reports of the loss")
    parser.add_argument("--result", type=Path, help="write the final loss and the parameters' SHA-256 to this JSON file")
    return parser.parse_args()


def main() -> None:
    """Train, and write the result."""
    given = arguments()
    torch.manual_seed(given.seed)  # the same initial weights on every rank
    torch.use_deterministic_algorithms(mode=True)
    holdfast.join()
    ranks = dist.get_world_size()

    full_model = ByteGPT(given.width, given.layers, given.heads, given.context)
    model = sharded(full_model, mesh_of(given.replicate))
    optimizer = torch.optim.AdamW(decayed(model, 0.1), lr=given.lr, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 20, total_iters=20)

    # Every rank draws the batches of all ranks and uses its own part: the order is the same whatever rank this process becomes.
    windows = Windows(library_text(given.bytes), given.context)
    order = RandomSampler(windows, generator=torch.Generator().manual_seed(given.seed))
    loader = holdfast.Loader(DataLoader(windows, given.batch * ranks, sampler=order, drop_last=True))

    with holdfast.session(model=model, optimizer=optimizer, schedulers=warmup, data=loader) as session:
        batches = iter(loader)
        for step in session.steps(until=given.steps):
            loss = model(*(half[session.rank :: ranks] for half in next(batches)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loss = mean_over_ranks(loss)  # before the optimizer, in whose step all ranks vote
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
            step.end(loss)
            if session.rank == 0 and session.steps_done == step.number and step.number % given.print_every == 0:
                print(f"step {step.number}: loss {session.loss:.4f}", flush=True)

        sha = fingerprint_of_all(model, ByteGPT(given.width, given.layers, given.heads, given.context))
    if session.rank == 0:
        print(f"done: {session.steps_done} steps, loss {session.loss}", flush=True)
    if session.rank == 0 and given.result:
        given.result.write_text(json.dumps({"steps": session.steps_done, "loss": session.loss, "parameters_sha256": sha}) + "\n")


if __name__ == "__main__":
    main()
