"""The training script of the benchmark of partial rebuilds: a pipeline x data mesh, and next to no computation.

Activations go down each pipeline, gradients are summed over the data ranks of a stage. A file ``die-N`` in the working directory has rank N
kill itself in its next step. A file ``rebuild`` has the next recovery rebuild more than it must: ``all`` groups, or with ``world`` also the
group of all ranks, as if the script used it.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from benchmarks.steps import StepNotes
from holdfast.runtime.groups.membership import GroupGeneration, MembershipManager

WIDTH = 64


def rebuild_more() -> None:
    """Have groups counted as used, and broken, as the file ``rebuild`` asks."""
    status = MembershipManager.group_status

    def more(self: MembershipManager, generation: GroupGeneration) -> dict[str, list[int | bool]]:
        found = status(self, generation)
        with suppress(OSError):
            what = Path("rebuild").read_text()
            world = next(group.group_name for group in self.groups if len(group.ranks) == generation.world)
            for name, (operations, broken, used) in found.items():
                found[name] = [operations, broken or what == "all", used or what == "all" or (what == "world" and name == world)]
        return found

    MembershipManager.group_status = more  # type: ignore[method-assign]


def die_if_asked(rank: int) -> None:
    """End as a killed process does, when the file that asks for it is there."""
    with suppress(FileNotFoundError):
        Path(f"die-{rank}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def work(model: nn.Module, stage: int, stages: int, pipeline: dist.ProcessGroup, data: dist.ProcessGroup) -> Tensor:
    """Do a step's work on this rank; return its loss."""
    values = torch.ones(4, WIDTH)
    if stage:
        dist.recv(values, group=pipeline, group_src=stage - 1)
    out = model(values)
    if stage < stages - 1:
        dist.send(out.detach(), group=pipeline, group_dst=stage + 1)
    loss: Tensor = out.square().mean()
    loss.backward()
    for one in model.parameters():
        assert one.grad is not None
        dist.all_reduce(one.grad, group=data)
    return loss


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between two steps")
    given = parser.parse_args()
    torch.manual_seed(1)
    rebuild_more()
    holdfast.join()
    mesh = init_device_mesh("cpu", (given.stages, dist.get_world_size() // given.stages), mesh_dim_names=("pipeline", "data"))
    pipeline, data = mesh["pipeline"].get_group(), mesh["data"].get_group()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    notes, committed, repeated = StepNotes(), 0, False
    with holdfast.session(model=model, optimizer=optimizer, any_rank=True) as session:
        for step in session.steps():
            if committed and not repeated:  # ranks that share a core leave it idle between two steps
                time.sleep(given.pace)
            repeated = True
            begin = time.perf_counter()
            die_if_asked(session.rank)
            loss = work(model, dist.get_rank(pipeline), given.stages, pipeline, data)
            optimizer.step()
            optimizer.zero_grad()
            step.end(loss)
            if session.steps_done == step.number:
                committed, repeated = step.number, False
                notes.note(session.rank, session.steps_done, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
