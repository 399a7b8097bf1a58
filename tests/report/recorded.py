"""Record the order in which real pipelines send and receive: torch's schedules over gloo, one process a rank.

`python -m tests.report.recorded` writes ``recorded.json`` anew, for the next version of torch.
"""

from __future__ import annotations

import functools
import json
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

FILE = Path(__file__).with_name("recorded.json")
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved3": 3, "looped": 2}
CASES = [
    ("gpipe", 2, 4),
    ("gpipe", 3, 8),
    ("gpipe", 4, 2),
    ("1f1b", 2, 2),
    ("1f1b", 2, 4),
    ("1f1b", 3, 8),
    ("1f1b", 4, 4),
    ("1f1b", 4, 8),
    ("interleaved", 2, 2),
    ("interleaved", 2, 4),
    ("interleaved", 2, 8),
    ("interleaved", 3, 6),
    ("interleaved", 4, 4),
    ("interleaved", 4, 8),
    ("interleaved3", 2, 4),
    ("interleaved3", 4, 8),
    ("looped", 2, 4),
    ("looped", 4, 4),
]
"""Schedule, ranks, micro-batches."""
_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved3": ScheduleInterleaved1F1B,
    "looped": ScheduleLoopedBFS,
}

Operations = list[tuple[str, int]]


class _Stage(PipelineStage):
    """Knows all shapes: nothing is sent but activations and gradients."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Any:  # noqa: FBT001
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Any = None) -> Any:
        return torch.ones(1, dtype=torch.int32)


def operations_of(schedule: str, ranks: int, microbatches: int) -> list[Operations]:
    """Run one step of a pipeline; return each rank's point-to-point operations with their peers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [context.Process(target=_one, args=(schedule, rank, (ranks, microbatches), port, ends[rank][1])) for rank in range(ranks)]
    for process in processes:
        process.start()
    for _, receiver in ends:  # or a rank that fails would be waited for
        receiver.close()
    try:
        return [end.recv() for end, _ in ends]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _one(schedule: str, rank: int, size: tuple[int, int], port: int, sender: Connection) -> None:
    ranks, microbatches = size
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    seen: Operations = []
    for name in ("isend", "irecv"):
        setattr(dist.distributed_c10d, name, _listening(getattr(dist.distributed_c10d, name), name[1:], seen))
        setattr(dist, name, getattr(dist.distributed_c10d, name))
    chunks = CHUNKS[schedule]
    parts = [nn.Linear(4, 4) for _ in range(chunks)]
    shape = torch.empty(1, 4, requires_grad=True)
    stages = [
        _Stage(part, rank + ranks * chunk, ranks * chunks, torch.device("cpu"), input_args=shape, output_args=shape)
        for chunk, part in enumerate(parts)
    ]
    made = _SCHEDULES[schedule](stages if chunks > 1 else stages[0], microbatches, loss_fn=nn.functional.mse_loss)
    for _ in range(2):  # the first step may hold what is said once only
        seen.clear()
        losses: list[Any] = []
        batch = torch.ones(microbatches, 4)
        made.step(*([batch] if rank == 0 else []), target=batch, losses=losses)
        dist.barrier()
    sender.send(list(seen))
    dist.destroy_process_group()


def _listening(real: Any, name: str, seen: Operations) -> Any:
    @functools.wraps(real)
    def call(tensor: Any, *positional: Any, **named: Any) -> Any:
        group, within = named.get("group"), named.get("group_dst", named.get("group_src"))
        peer = positional[0] if positional else named.get("dst", named.get("src"))
        if peer is None:
            assert within is not None
            peer = within if group is None else dist.get_global_rank(group, within)
        seen.append((name, int(peer)))
        return real(tensor, *positional, **named)

    return call


if __name__ == "__main__":
    found = [
        {"schedule": schedule, "ranks": ranks, "microbatches": many, "operations": operations_of(schedule, ranks, many)}
        for schedule, ranks, many in CASES
    ]
    FILE.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n")
    print(f"{len(found)} pipelines in {FILE.name}")
