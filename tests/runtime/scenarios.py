"""What the ranks of the tests do: functions of plain values that return plain values, run by `rank_server`."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from holdfast.runtime.peer_errors import describe
from holdfast.runtime.process.exit import wait_until_idle
from holdfast.runtime.session import Session
from tests.runtime.damage import names

RANK = int(os.environ.get("RANK", "0"))
"""Of the process that imported this, which is a rank: the server imports it after the fork."""

RANKS = int(os.environ.get("WORLD_SIZE", "1"))

SOON, LATE = timedelta(seconds=2), timedelta(seconds=60)
"""Timeouts of groups: where a rank is waited for in vain, and where it comes."""


class Noisy(Dataset[Tensor]):
    """Numbers with random noise: what comes out depends on every generator's state when it is loaded."""

    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Tensor:
        noise = random.random() + float(np.random.random())  # noqa: NPY002 (the global generator is the point)
        return torch.full((8,), float(number)) / self.size + torch.randn(8) * 0.1 + noise * 0.01


def net(kind: str) -> nn.Module:
    """Make a small model whose training draws random numbers."""
    torch.manual_seed(7)
    middle: nn.Module = nn.BatchNorm1d(32) if kind == "norm" else nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), middle, nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))


def numbers(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers, gathered from their shards."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(whole.detach().float().numpy().tobytes())
    return digest.hexdigest()


def train(
    directory: str | None = None,
    *,
    until: int = 12,
    every: int | None = 4,
    keep: int = 2,
    dies_after: int | None = None,
    kind: str = "dropout",
    wrap: str = "ddp",
    workers: int = 0,
    endless: bool = True,
    settle: bool = True,
    hold: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """Train; return the losses by step, the digest of the model, and the first step.

    *hold*: a step, and a file that is waited for after it.
    """
    random.seed(RANK)
    np.random.seed(RANK)  # noqa: NPY002 (the global generator is part of the state)
    if wrap == "fsdp":
        dist.init_process_group("gloo")
    model = net(kind)
    if wrap == "fsdp":
        fully_shard(model)
    if kind == "bfloat16":
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, until)
    torch.manual_seed(100 + RANK)
    loader = holdfast.Loader(_data(workers), endless=endless)
    losses: dict[str, float | None] = {}
    with holdfast.session(
        model=model, optimizer=optimizer, schedulers=schedule, data=loader, checkpoint_dir=directory, save_every=every, keep=keep
    ) as session:
        began = session.steps_done
        used: nn.Module = DistributedDataParallel(model, bucket_cap_mb=1) if wrap == "ddp" and RANKS > 1 else model
        used = session.stabilize_ddp(used) if settle else used
        batches = _batches(loader)
        for step in session.steps(until=until):
            loss = _learn(used, optimizer, next(batches))
            schedule.step()
            step.end(loss)
            losses[str(step.number)] = session.loss
            while hold is not None and step.number == hold[0] and not Path(hold[1]).exists():
                time.sleep(0.01)
            if step.number == dies_after:
                _die(losses)
        return _result(session, losses, model, loader) | {"began": began}


def _data(workers: int) -> DataLoader[Tensor]:
    dataset = Noisy()
    if RANKS == 1:
        return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, num_replicas=RANKS, rank=RANK, seed=3)
    return DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers)


def _batches(loader: holdfast.Loader) -> Iterator[Tensor]:
    while True:
        yield from loader


def _learn(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    batch = batch.to(next(model.parameters()).dtype)
    loss: Tensor = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _die(losses: dict[str, float | None]) -> None:
    """End as a killed process does, but leave the losses in the log."""
    sys.stdout.write(f"{losses}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _result(session: Session, losses: dict[str, float | None], model: nn.Module, loader: holdfast.Loader) -> dict[str, Any]:
    return {
        "losses": losses,
        "model": numbers(model),
        "step": session.steps_done,
        "resumed_from": session.resumed_from and session.resumed_from.name,
        "position": [loader.epoch, loader.consumed],
    }


def train_without_room(directory: str, **arguments: Any) -> dict[str, Any]:
    """Train with one rank that cannot write more than a little: its error must reach all ranks."""
    if RANK == RANKS - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return train(directory, **arguments)


def train_as_nobody(directory: str, **arguments: Any) -> dict[str, Any]:
    """Train as a user without write permission for the directory."""
    os.setuid(65534)
    return train(directory, **arguments)


def half_precision(directory: str) -> dict[str, Any]:
    """Save and restore an optimizer that keeps float32 moments of bfloat16 weights."""
    found: dict[str, Any] = {}
    for turn in ("saved", "restored"):
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        with holdfast.session(model=model, optimizer=optimizer, checkpoint_dir=directory, save_every=1) as session:
            if turn == "saved":
                for step in session.steps(until=1):
                    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
                    optimizer.step()
                    for state in optimizer.state.values():
                        state["exp_avg"] = state["exp_avg"].float() + 1e-6
                    step.end()
            moment = optimizer.state[model.weight]["exp_avg"]
            found[turn] = [str(moment.dtype), moment.tolist()]
    return found


def lose_a_peer(how: str) -> list[dict[str, Any]]:
    """Kill rank 1 and return every error that the others then get."""
    met: list[dict[str, Any]] = []
    try:
        if how != "never-came" or RANK != 1:
            dist.init_process_group("gloo", timeout=SOON if how == "never-came" else LATE)
            _meet(how, met)
    except RuntimeError as error:
        met.append(describe(error))
    return met


def _meet(how: str, met: list[dict[str, Any]]) -> None:
    value = torch.ones(100_000)
    dist.all_reduce(value)
    distributed_c10d._set_pg_timeout(SOON)  # from here on: ranks may come late on a busy machine
    if RANK == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 1 and how == "silent":
        time.sleep(5)
        return
    things: list[Any] = [None] * RANKS
    acts: list[Callable[[], object]] = [
        lambda: dist.all_reduce(value),
        lambda: dist.all_reduce(value),
        lambda: dist.all_gather_object(things, 1),
        dist.barrier,
        lambda: dist.send(value, 1),
        lambda: dist.recv(value, 1),
    ]
    for act in acts:
        try:
            act()
        except RuntimeError as error:
            met.append(describe(error))


def lose_the_store() -> list[dict[str, Any]]:
    """Kill rank 0, which serves the store; return the error of the other when it needs the store."""
    dist.init_process_group("gloo", timeout=LATE)
    dist.barrier()
    if RANK == 0:
        os._exit(0)
    met: list[dict[str, Any]] = []
    store = distributed_c10d._get_default_store()
    acts: list[Callable[[], object]] = [lambda: store.get("x"), lambda: store.set("x", "y"), lambda: dist.new_group([0, 1])]
    for act in acts:
        for _ in range(2):  # the first write to a dead connection may still go through
            try:
                act()
            except RuntimeError as error:
                met.append(describe(error))
    return met


def script(path: str, *, argv: list[str]) -> None:
    """Run a training script as its own ``__main__``."""
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")


def come_to_rest() -> bool:
    """Reduce a few times, and wait as a process does that is about to end."""
    dist.init_process_group("gloo")
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    return wait_until_idle(seconds=60)


def mismatch() -> list[dict[str, Any]]:
    """Make a user error in a collective: no peer is lost."""
    dist.init_process_group("gloo", timeout=LATE)
    met: list[dict[str, Any]] = []
    acts: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX),
        lambda: dist.broadcast(torch.ones(1), 9),
    ]
    for act in acts:
        try:
            act()
        except (RuntimeError, ValueError) as error:
            met.append(describe(error))
    dist.barrier()
    return met


def save_for_ever(directory: str) -> None:
    """Save a model of a few megabytes again and again, until killed."""
    torch.manual_seed(RANK)
    model = nn.Linear(700, 700)
    with holdfast.session(model=model, checkpoint_dir=directory, save_every=1) as session:
        for step in session.steps():
            with torch.no_grad():
                model.weight.fill_(step.number)
            step.end()


def restore(directory: str) -> dict[str, Any]:
    """Restore what `save_for_ever` saved; return the step and whether the model is that of the step."""
    model = nn.Linear(700, 700)
    with holdfast.session(model=model, checkpoint_dir=directory, save_every=0) as session:
        return {"step": session.steps_done, "fits": bool((model.weight == session.steps_done).all()), "left": names(Path(directory))}
