"""A small job under DDP and managed groups that gets into the trouble it is asked for (`benchmarks.troubles.trouble`), between two steps.

What is asked for are statements, run with what is global here: ``time.sleep(3600)``, ``slow = 0.2``, ``poison = math.nan``, ``flip()``.
What is asked for in the folder ``at-start`` below is run by the next process of the rank, before it joins. A file ``last-step`` beside the
troubles ends the training after the step that it names. ``--result`` gets the parameters at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from benchmarks.troubles import troubled

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step in which the rank works on its own")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--stock-groups", action="store_true", help="leave the groups to torch")
parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--dropout", type=float, default=0.0, help="share of the inputs that is left out, by the ranks' random numbers")
parser.add_argument("--rest", type=float, default=0.0, help="seconds of a step in which the rank sleeps")
parser.add_argument(
    "--result",
    type=Path,
    help="rank 0 writes here, in the end, the last step and the SHA-256 of the parameters; beside it every rank its losses",
)
given = parser.parse_args()

slow = 0.0
"""Seconds that this rank works longer in each step."""
traffic = 0
"""Values that all ranks sum up besides, which keeps the links busy."""
poison = 1.0
"""What the loss is multiplied with."""


def work(seconds: float) -> None:
    """Compute for *seconds* of CPU time or wall time, whichever is over first."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1000))


def stuck_in_user_code() -> None:
    """Come to no end."""
    while True:
        time.sleep(0.01)


def flip(bit: int = 20) -> None:
    """Flip one bit of a parameter, as a cosmic ray does."""
    values = model.get_parameter("2.weight").detach().view(-1).view(torch.int32)
    values[5] ^= 1 << bit


def cut_connections() -> None:
    """Break every network connection of this process, as a link does that is down for a moment; nobody ends for it."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():  # who only listens has none
                        one.shutdown(socket.SHUT_RDWR)


def last_step() -> int:
    """Return the step after which training is to end."""
    with suppress(OSError, ValueError):
        return int((folder / "last-step").read_text())
    return int(given.steps)


def note_loss(place: Path, step: int, loss: float) -> None:
    """Write down what this rank's loss was in a step that counts: a line that is there whatever becomes of processes and nodes."""
    file = os.open(place / f"losses-{session.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.write(file, f"{step} {loss!r}\n".encode())
    os.close(file)


def write_result(place: Path, step: int) -> None:
    """Write down how training ended, whole or not at all."""
    digest = hashlib.sha256()
    for one in model.parameters():
        digest.update(one.detach().numpy().tobytes())
    beside = place.with_suffix(".partial")
    beside.write_text(json.dumps({"step": step, "parameters_sha256": digest.hexdigest()}))
    beside.replace(place)


folder = Path(os.environ.get("HOLDFAST_CHECKPOINT_DIR", "."))
if "HOLDFAST_HOT_SPARE" not in os.environ:
    exec(troubled(folder / "at-start", int(os.environ["RANK"])), globals())  # noqa: S102 (what the test or the benchmark asks for)
torch.set_num_threads(1)
if not given.stock_groups:
    holdfast.join()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, given.width), nn.GELU(), nn.Linear(given.width, given.width), nn.GELU(), nn.Linear(given.width, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=given.rate, momentum=given.momentum)
with holdfast.session(model=model, optimizer=optimizer) as session:
    wrapped = session.stabilize_ddp(DistributedDataParallel(model, process_group=session.group))
    for step in session.steps(until=given.steps):
        if step.number > last_step():
            break
        source = torch.Generator().manual_seed(step.number * 1000 + session.rank)
        inputs = torch.randn(8, 16, generator=source)
        inputs = nn.functional.dropout(inputs, given.dropout)
        time.sleep(given.rest)
        work(given.pace + slow)
        if "HOLDFAST_HOT_SPARE" not in os.environ:  # whose steps are a warm-up
            exec(troubled(folder, session.rank), globals())  # noqa: S102 (as above)
        loss = nn.functional.mse_loss(wrapped(inputs), inputs[:, :4].sin()) * poison
        loss.backward()
        if traffic:
            dist.all_reduce(torch.zeros(traffic))
        optimizer.step()
        optimizer.zero_grad()
        if not math.isfinite(poison):
            poison = 1.0
        step.end(loss)
        if given.result is not None and session.steps_done == step.number and "HOLDFAST_HOT_SPARE" not in os.environ:
            note_loss(given.result.parent, step.number, loss.item())
    if given.result is not None and session.rank == 0:
        write_result(given.result, session.steps_done)
