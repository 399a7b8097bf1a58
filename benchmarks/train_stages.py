"""One stage of a pipeline, pinned to a core of its own, that keeps its state in one of several ways, a block of steps each.

Run by `benchmarks.checkpoint`. The compute of a stage is real (matrices), or with ``--sleep`` a timed sleep. ``--ballast`` adds a parameter
without a gradient: it makes the state larger and the compute not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.nn import functional

import holdfast
from holdfast.runtime.snapshots.snapshotter import Snapshotter


class Slow(torch.autograd.Function):
    """Takes its time, forward and backward, without using the core: a stage of a machine with more cores than this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # noqa: ANN401
        """Pass *x* on after *seconds*."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """Pass the gradient back after twice as long."""
        time.sleep(2 * ctx.seconds)
        return grad, None


class Part(nn.Module):
    """A stage: some layers, and ballast."""

    def __init__(self, width: int, layers: int, ballast: int, sleep: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.ballast = nn.Parameter(torch.zeros(ballast // 4), requires_grad=False)
        self.sleep = sleep

    def forward(self, x: Tensor) -> Tensor:
        """Pass *x* on."""
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return Slow.apply(x, self.sleep) if self.sleep else x  # type: ignore[no-untyped-call]


class Stage(PipelineStage):
    """A stage that knows all shapes, and has nothing to ask before its first step."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:  # noqa: ARG002, FBT001 (torch's)
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:  # noqa: ARG002 (torch's)
        return torch.ones(1, dtype=torch.int32)


class Trace:
    """When this rank posted which messages, waited for them, and computed: what `benchmarks.pipeline_model` takes its costs from."""

    def __init__(self, stage: PipelineStage) -> None:
        self.events: list[tuple[str, float, float, int, int]] = []
        """What (``post``, ``wait``, ``forward``, ``backward``, ``step``), begin, end; sends and receives that were posted."""
        for name in ("forward", "backward"):
            setattr(stage, f"{name}_one_chunk", self._timed(name, getattr(stage, f"{name}_one_chunk")))
        schedules._batch_p2p = self._timed("post", schedules._batch_p2p)  # noqa: SLF001 (where its schedules call)
        schedules._wait_batch_p2p = self._timed("wait", schedules._wait_batch_p2p)  # noqa: SLF001

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:  # noqa: ANN401 (torch's own)
            begin = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                sends = sum(one.op is dist.isend for one in args[0]) if name == "post" else 0
                self.events.append((name, begin, time.perf_counter(), sends, len(args[0]) - sends if name == "post" else 0))

        return timed


class Rivals:
    """Other ways to keep the state, each rank its own: what a step of theirs does, and what is still to be waited for."""

    def __init__(self, part: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self._part, self._optimizer, self._folder = part, optimizer, folder
        self._last: Any = None

    def _state(self) -> dict[str, Any]:
        return {"model": self._part.state_dict(), "optimizer": self._optimizer.state_dict()}

    def none(self) -> None:
        """Keep nothing."""

    def sync(self) -> None:
        """`torch.save`."""
        torch.save(self._state(), self._folder / "sync.pt")

    def thread(self) -> None:
        """`async_save` in a thread; one save at a time, as its documentation asks for."""
        self._async(AsyncCheckpointerType.THREAD)

    def process(self) -> None:
        """`async_save` in a process."""
        self._async(AsyncCheckpointerType.PROCESS)

    def _async(self, kind: AsyncCheckpointerType) -> None:
        self.wait()
        writer = dcp.FileSystemWriter(self._folder / kind.value, sync_files=False, overwrite=True)
        self._last = dcp.async_save(self._state(), storage_writer=writer, async_checkpointer_type=kind, no_dist=True)

    def wait(self) -> None:
        """Wait for what is still under way."""
        if self._last is not None:
            getattr(self._last, "upload_completion", self._last).result()
            self._last = None


def main() -> None:
    """Train in blocks; write how long each took."""
    given = _arguments()
    rank = int(os.environ["RANK"])
    if not given.sleep:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    holdfast.join()
    stages = dist.get_world_size()
    part = Part(given.width, given.layers, given.ballast, given.sleep)
    optimizer = torch.optim.AdamW([one for one in part.parameters() if one.requires_grad], lr=1e-4)
    folder = given.place / f"rank-{rank}"
    folder.mkdir(parents=True)
    rivals = Rivals(part, optimizer, folder)
    size = torch.empty(given.rows, given.width, requires_grad=True)
    stage = Stage(part, rank, stages, torch.device("cpu"), input_args=size, output_args=size)
    kind = ScheduleGPipe if given.schedule == "gpipe" else Schedule1F1B
    schedule = kind(stage, given.microbatches, loss_fn=lambda out, _: out.square().mean())
    batch, target = torch.randn(given.rows * given.microbatches, given.width), torch.zeros(given.rows * given.microbatches, 1)
    trace = Trace(stage) if given.trace else None
    order = random.Random(given.seed)  # noqa: S311 (an order of blocks)

    with holdfast.session(model=part, optimizer=optimizer) as session:
        steps = iter(session.steps())

        def train(after: Callable[[], None]) -> None:
            step = next(steps)
            begin = time.perf_counter()
            schedule.step(*([batch] if rank == 0 else []), target=target)
            if trace is not None:
                trace.events.append(("step", begin, time.perf_counter(), 0, 0))
            optimizer.step()
            optimizer.zero_grad()
            step.end()
            after()

        snapshotter = session._snapshotter  # noqa: SLF001 (what a user never does: turn it off and on)
        assert snapshotter is not None
        for _ in range(given.warm):
            train(rivals.none)
        blocks = [
            {"round": number, "mode": mode, **_block(mode, given.block, train, snapshotter, rivals)}
            for number in range(given.rounds)
            for mode in order.sample(given.modes, len(given.modes))
        ]
        (given.place / f"rank-{rank}.json").write_text(
            json.dumps({**_stats_of(snapshotter), "blocks": blocks, "trace": trace and trace.events})
        )
    shutil.rmtree(folder)
    sys.stdout.flush()


COUNTS: Final = ("copied", "overlapped", "paused", "taken", "prepared")


def _block(mode: str, count: int, train: Callable[[Callable[[], None]], None], snapshotter: Snapshotter, rivals: Rivals) -> dict[str, Any]:
    """Train a block of steps in *mode*; return how long each took, and what snapshots have cost in them."""
    snapshotter.enabled = mode == "ours"
    after = rivals.none if mode == "ours" else getattr(rivals, mode)
    train(after)  # the first of a block is not counted: it carries what the block before left
    rivals.wait()
    dist.barrier()
    before, ends = asdict(snapshotter.counts), [time.perf_counter()]
    for number in range(count):
        train(after)
        if number == count - 1:
            rivals.wait()
        ends.append(time.perf_counter())
    now = asdict(snapshotter.counts)
    return {"steps": [end - begin for begin, end in pairwise(ends)], **{name: now[name] - before[name] for name in COUNTS}}


def _stats_of(snapshotter: Snapshotter) -> dict[str, Any]:
    plan, profile = snapshotter.planning.plan, snapshotter.planning.profile
    reason = None if plan is None else {"overhead": plan.overhead, "reason": plan.reason}
    return {"size": snapshotter.counts.size, "step": profile.step, "idle": profile.idle, "plan": reason}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--ballast", type=int, default=0, help="bytes")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--trace", type=int, default=0, help="1: record when what was done in each step")
    parser.add_argument("--warm", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="+", default=["none", "sync", "thread", "process", "ours"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
