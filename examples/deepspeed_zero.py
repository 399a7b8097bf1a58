"""Train a small model with DeepSpeed's ZeRO: it saves and resumes as ever, and reports its steps to Holdfast.

holdfast run --nproc-per-node 2 examples/deepspeed_zero.py --steps 50
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import holdfast

BATCH = 8


def train(folder: Path, steps: int, every: int, before_step: Callable[[int], None] = lambda _: None, **zero: int) -> nn.Module:
    """Train with the settings *zero*, save *every* few steps, and resume from the newest checkpoint; return the model."""
    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
        print(f"rank {rank}: resumed after step {engine.global_steps}", flush=True)
    while engine.global_steps < steps:
        step = engine.global_steps + 1
        before_step(step)
        inputs = torch.rand(BATCH, 8, generator=torch.Generator().manual_seed(step * ranks + rank)).to(engine.device)
        loss = nn.functional.mse_loss(engine(inputs), inputs.sin().sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        holdfast.heartbeat(engine.global_steps, loss, until=steps)
        if step % every == 0:
            with holdfast.section("checkpoint of DeepSpeed"):
                engine.save_checkpoint(str(folder))
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.barrier()
    return model


def main() -> None:
    """Train as the options say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("deepspeed-zero"))
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="of ZeRO")
    given = parser.parse_args()
    train(given.folder, given.steps, every=10, stage=given.stage)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
