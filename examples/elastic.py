"""Train the byte-level GPT of byte_gpt.py on any number of ranks: elastic training.

- `torchrun --nproc-per-node 3 examples/elastic.py --steps 50`: three ranks
- `holdfast run examples/elastic.yaml`: on three nodes, and on two while one of them is lost

A step has one batch, whose windows are divided among the ranks in each step. So a step has the same windows, and its gradient is the mean
over them, at any number of ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from byte_gpt import ByteGPT, Windows, decayed, library_text, wrapped  # type: ignore[import-not-found]
from torch.utils.data import DataLoader

import holdfast


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=12, help="windows per step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="maximum bytes of text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS", help="steps between two reports of the loss")
    return parser.parse_args()


def main() -> None:
    """Train."""
    given = arguments()
    torch.manual_seed(given.seed)  # the same initial weights on every rank
    holdfast.join()
    model = ByteGPT(given.width, given.layers, given.heads, given.context)
    optimizer = torch.optim.AdamW(decayed(model, 0.1), lr=given.lr)
    windows = Windows(library_text(given.bytes), given.context)
    order = torch.Generator().manual_seed(given.seed)  # the same order on every rank
    loader = holdfast.Loader(DataLoader(windows, given.batch, shuffle=True, generator=order, drop_last=True))

    with holdfast.session(model=model, optimizer=optimizer, data=loader, any_rank=True) as session:
        parallel = session.stabilize_ddp(wrapped(model))
        for step in session.steps(until=given.steps):
            mean = torch.zeros(())
            for part in session.micro_batches():  # one; more while ranks are missing
                loss = parallel(*part.batch) * part.weight
                loss.backward()
                mean += loss.detach()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            step.end(mean)
            if session.rank == 0 and session.steps_done == step.number and step.number % given.print_every == 0:
                print(f"step {step.number}: loss {session.loss:.4f}", flush=True)
    if session.rank == 0:
        print(f"done: {session.steps_done} steps, loss {session.loss}", flush=True)


if __name__ == "__main__":
    main()
