"""What frameworks and scripts ask of torch after `init_process_group`: writes down what they get, and what stays their own affair."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group, distributed_c10d, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from holdfast.runtime.groups.membership import installed
from holdfast.runtime.groups.process_group import ManagedGroup

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])


def summed(group: Any = None) -> float:
    """Return the sum of 1, 2, ... over the ranks of *group*."""
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number, group=group)
    return float(number)


def own_group(place: int, file: str) -> None:
    """Make a group of two processes that are no ranks of the job, each with its own idea of rank and size."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=place, world_size=2)
    number = torch.ones(1)
    dist.all_reduce(number)
    Path(f"{file}-{place}").write_text(f"{type(dist.group.WORLD).__name__} {int(number)}")
    dist.destroy_process_group()


def of_children(start: str) -> list[str]:
    """Start two processes in the way of *start* that make their own group; return what they got."""
    file = folder / f"{start}-{rank}"
    context: Any = multiprocessing.get_context(start)
    children = [context.Process(target=own_group, args=(place, str(file))) for place in range(2)]
    for one in children:
        one.start()
    for one in children:
        one.join()
    return [Path(f"{file}-{place}").read_text() for place in range(2)]


def main() -> None:
    """Ask everything, and write down the answers."""
    results: dict[str, Any] = {"before": dist.is_initialized(), "same": dist.init_process_group is distributed_c10d.init_process_group}
    if rank == 0:
        results["fork"] = of_children("fork")
        results["spawn"] = of_children("spawn")
    init_process_group(backend="gloo", timeout=timedelta(minutes=3))
    world: Any = dist.group.WORLD
    results["kind"], results["timeout"] = type(world).__name__, world.timeout.total_seconds()
    results["backend"] = [str(dist.get_backend()), dist.get_backend() is dist.Backend.GLOO, dist.get_backend_config()]
    results["device"] = [distributed_c10d._get_object_coll_device(), distributed_c10d._device_capability()]
    results["default timeout"] = distributed_c10d._get_default_timeout(dist.get_backend()).total_seconds()
    try:
        init_process_group(backend="gloo")
    except ValueError as error:
        results["again"] = str(error)
    groups = {
        "default": dist.new_group(),
        "named": dist.new_group(backend="gloo"),
        "both": dist.new_group(backend="cpu:gloo,cuda:nccl"),
        "part": dist.new_group([0, 1], timeout=timedelta(minutes=1), use_local_synchronization=True),
    }
    members = {name: group for name, group in groups.items() if isinstance(group, dist.ProcessGroup)}
    results["groups"] = {name: [type(group).__name__, str(dist.get_backend(group)), summed(group)] for name, group in members.items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results["mesh"] = [type(mesh.get_group()).__name__, str(dist.get_backend(mesh.get_group()))]
    dist.barrier(device_ids=[0])
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": rank})
    results["objects"] = gathered
    loader = DataLoader(TensorDataset(torch.arange(8.0)), 2, num_workers=1)
    results["loaded"] = sum(float(batch.sum()) for (batch,) in loader)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    logged = model._get_ddp_logging_data()
    results["ddp"] = logged.get("world_size")

    destroy_process_group()
    results["destroyed"] = dist.is_initialized()
    init_process_group(backend="gloo")
    dist.barrier()
    results["second"] = [type(dist.group.WORLD).__name__, summed(), summed(dist.new_group()), installed() is not None]
    results["managed"] = isinstance(dist.group.WORLD, ManagedGroup)
    destroy_process_group()
    (folder / f"result-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
