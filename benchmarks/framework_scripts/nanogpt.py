"""In the shape of nanoGPT's train.py: batches drawn at random, a checkpoint of its own every ten steps, and nothing about Holdfast."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.framework_scripts.common import BATCH, PLACE, RANK, STEPS, Gpt, Tokens, mark, save_weights

dist.init_process_group("gloo")
torch.manual_seed(1337)
model, begin = Gpt(), 0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpoint = PLACE / "ckpt.pt"
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
ddp = torch.nn.parallel.DistributedDataParallel(model)
data = Tokens(STEPS)
for step in range(begin + 1, STEPS + 1):
    torch.manual_seed(1337 + step * 8 + int(RANK))
    batch = torch.stack([data[int(place)] for place in torch.randint(len(data), (BATCH,))])
    loss = ddp(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0 and RANK == "0":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, PLACE / "new.pt")
        (PLACE / "new.pt").replace(checkpoint)
    mark(step)
dist.barrier()
save_weights(model.state_dict())
dist.destroy_process_group()
