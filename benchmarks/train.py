"""The training script of the benchmarks: an MLP under DDP, by default of about 10 million parameters.

It writes down when each step was done (steps.py). A file ``raise-N`` in the working directory makes rank N raise at its next step, and
``raised-N`` has the time; a file ``die-N`` makes it kill itself, ``hang-N`` wait as long as it is there. ``--stock-groups`` leaves
the groups to torch: then only a restart helps. With ``--device cuda`` all ranks share the first card.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from benchmarks.steps import StepNotes


def fail_if_asked(rank: int) -> None:
    """Raise or die, once, when the file that asks for it is there."""
    with suppress(FileNotFoundError):
        Path(f"die-{rank}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(FileNotFoundError):
        Path(f"raise-{rank}").unlink()
        Path(f"raised-{rank}").write_text(f"{time.time():.6f}")
        raise RuntimeError("the benchmark asked for an exception")


def hang_if_asked(rank: int) -> None:
    """Wait for ever when the file that asks for it is there, and write down since when."""
    asked = Path(f"hang-{rank}")
    if asked.exists():
        Path(f"hanging-{rank}").write_text(f"{time.time():.6f}")
        while asked.exists():
            time.sleep(0.01)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--compile", action="store_true", help="train what torch.compile makes of the model")
    parser.add_argument("--stock-groups", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout", type=float, help="seconds that torch's own groups wait for a peer")
    return parser.parse_args()


def share_a_card() -> None:
    """Have NCCL accept that other ranks use this process's card."""
    from tests.gpu.one_card import settings  # noqa: PLC0415 (on a card alone)

    os.environ.update(settings(os.getpid(), tuple(torch.cuda.nccl.version())))


def main() -> None:
    """Train until killed."""
    given = arguments()
    if given.device == "cuda":
        share_a_card()
    if not given.stock_groups:
        holdfast.join()
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=given.timeout) if given.timeout else None)
    torch.manual_seed(1)
    width = given.width
    model = nn.Sequential(*(layer for _ in range(given.layers) for layer in (nn.Linear(width, width), nn.GELU())), nn.Linear(width, 8))
    model.to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    numbers = TensorDataset(torch.randn(4096, width), torch.randn(4096, 8))
    order: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(numbers, drop_last=True)
    loader = holdfast.Loader(DataLoader(numbers, given.batch, sampler=order, drop_last=True))
    notes = StepNotes()
    with holdfast.session(model=model, optimizer=optimizer, data=loader, any_rank=True) as session:
        parallel = session.stabilize_ddp(DistributedDataParallel(model, bucket_cap_mb=1000))
        forward = torch.compile(parallel) if given.compile else parallel
        batches = iter(loader)
        for step in session.steps():
            begin = time.perf_counter()
            fail_if_asked(session.rank)
            hang_if_asked(session.rank)
            time.sleep(given.pace)
            values, wanted = (one.to(given.device) for one in next(batches))
            loss = nn.functional.mse_loss(forward(values), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.end(loss)
            if session.steps_done == step.number:  # not in a warm-up, and not in a step that did not count
                notes.note(session.rank, session.steps_done, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
