# mypy: ignore-errors
"""A training script in the shape of nanoGPT's train.py, as its author has it: nothing in it knows of Holdfast."""

import os
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
out_dir = "out"
eval_interval = 5
batch_size = 4
block_size = 8
gradient_accumulation_steps = 2 * 2  # used to simulate larger batch sizes
learning_rate = 1e-2
max_iters = 60
pause = 0.0
backend = "gloo"
# -----------------------------------------------------------------------------
for arg in sys.argv[1:]:  # configurator.py
    if arg.startswith("--"):
        key, val = arg[2:].split("=")
        globals()[key] = type(globals()[key])(val)
# -----------------------------------------------------------------------------

ddp = int(os.environ.get("RANK", -1)) != -1  # is this a ddp run?
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    device = "cpu"
    master_process = ddp_rank == 0  # this process will do logging, checkpointing etc.
    seed_offset = ddp_rank  # each process gets a different seed
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset, ddp_world_size, device = True, 0, 1, "cpu"

if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.set_num_threads(1)
torch.manual_seed(1337)
ctx = nullcontext()

data = np.random.default_rng(7).integers(0, 16, 4096)


def get_batch(number):
    ix = np.random.default_rng((1337 + seed_offset, number)).integers(0, len(data) - block_size, batch_size)
    x = torch.stack([torch.from_numpy(data[i : i + block_size]) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size]) for i in ix])
    return x.to(device), y.to(device)


iter_num = 0
model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if os.path.exists(os.path.join(out_dir, "ckpt.pt")):
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    print(f"resuming from iteration {iter_num}")
    checkpoint = None  # free up memory

# wrap model into DDP container
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

micro = iter_num * gradient_accumulation_steps
X, Y = get_batch(micro)  # fetch the very first batch
while True:
    if iter_num % eval_interval == 0 and master_process:
        checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt.tmp"))
        os.replace(os.path.join(out_dir, "ckpt.pt.tmp"), os.path.join(out_dir, "ckpt.pt"))
        print(f"saved iteration {iter_num}", flush=True)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            # in DDP training we only need to sync gradients at the last micro step.
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits = model(X)
            loss = nn.functional.cross_entropy(logits.view(-1, 16), Y.view(-1)) / gradient_accumulation_steps
        micro += 1
        X, Y = get_batch(micro)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(pause)
    iter_num += 1
    if iter_num >= max_iters:
        break

if master_process:
    torch.save(raw_model.state_dict(), os.path.join(out_dir, "final.pt"))
if ddp:
    destroy_process_group()
