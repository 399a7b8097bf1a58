"""All that ranks can exchange before their first step, with a different value on every rank; each rank records its results.

Options: ``any`` (any_rank), ``one`` (only what every rank is given alike), ``name`` (rank 0 makes up a name and sends it as an object),
``number`` (as a tensor), ``large`` (more than a rank records), ``asks`` (a process that takes a rank over leaves one operation out),
``wide`` (parameters that a rank does not record, and the session restores), ``between`` (an exchange between two steps),
``slow`` (steps take their time), ``draws`` (each process gives a number that it draws).
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast
from tests.runtime.chaos import gate, reach

folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])
torch.set_num_threads(1)
holdfast.join()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
results: dict[str, Any] = {}
reach("begun")


def mine(size: int, add: float = 0.0) -> Tensor:
    """Return numbers that are this rank's, in this place of the script."""
    return torch.arange(float(size)) + 100.0 * (rank + 1) + add


def room(size: int = 3) -> list[Tensor]:
    """Return room for a tensor of each rank, with nothing sensible in it."""
    return [torch.full((size,), -1.0) for _ in range(ranks)]


def plain(value: Any) -> Any:
    """Return *value* as JSON holds it."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def alike() -> None:
    """Exchange what leaves the same on every rank, from every root."""
    for root in range(ranks):
        one = mine(3) if rank == root else torch.full((3,), -1.0)
        dist.broadcast(one, root)
        results[f"broadcast-{root}"] = one
        objects: list[Any] = [{"of": root, "list": ["x"] * (root + 1)}, root] if rank == root else [None, None]
        dist.broadcast_object_list(objects, root)
        results[f"broadcast_object_list-{root}"] = objects
    for kind in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        one = mine(4)
        dist.all_reduce(one, kind)
        results[f"all_reduce-{kind}"] = one
    later = mine(2)
    work = dist.all_reduce(later, async_op=True)
    assert work is not None
    work.wait()
    results["all_reduce-later"] = later
    dist.all_gather(gathered := room(), mine(3))
    dist.all_gather_into_tensor(whole := torch.full((3 * ranks,), -1.0), mine(3))
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, {"rank": rank, "long": "y" * rank})
    results.update(all_gather=gathered, all_gather_into_tensor=whole, all_gather_object=everybody)
    dist.barrier()


def unlike() -> None:
    """Exchange what leaves something else on every rank, from and to every root."""
    for root in range(ranks):
        dist.scatter(part := torch.full((2,), -1.0), [mine(2, 10.0 * one) for one in range(ranks)] if rank == root else None, root)
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, [f"{root} to {one}" + "z" * one for one in range(ranks)] if rank == root else None, root)
        dist.gather(mine(3), gathered := room() if rank == root else None, root)
        objects: list[Any] | None = [None] * ranks if rank == root else None
        dist.gather_object(f"of {rank}", objects, root)
        one = mine(3)
        dist.reduce(one, root)
        results.update({f"scatter-{root}": part, f"scatter_object_list-{root}": scattered, f"gather-{root}": gathered})
        results.update({f"gather_object-{root}": objects, f"reduce-{root}": one if rank == root else None})
    dist.reduce_scatter(part := torch.full((2,), -1.0), [mine(2, 10.0 * one) for one in range(ranks)])
    dist.reduce_scatter_tensor(flat := torch.full((2,), -1.0), mine(2 * ranks))
    exchanged = room(2)
    if torch.__version__ >= "2.12":  # before, gloo had none
        dist.all_to_all(exchanged, [mine(2, 10.0 * one) for one in range(ranks)])
    dist.all_to_all_single(single := torch.full((2 * ranks,), -1.0), mine(2 * ranks))
    results.update(reduce_scatter=part, reduce_scatter_tensor=flat, all_to_all=exchanged, all_to_all_single=single)
    for source in range(ranks):
        target = (source + 1) % ranks
        got, anybody, parcel = torch.full((3,), -1.0), torch.full((2,), -1.0), [None]
        sender = -1
        if rank == source:
            dist.send(mine(3), target)
            dist.send(mine(2), target)
            dist.send_object_list([f"parcel of {rank}"], target)
        elif rank == target:
            dist.recv(got, source)
            sender = dist.recv(anybody)
            dist.recv_object_list(parcel, source)
        results.update({f"recv-{source}": got, f"recv-anybody-{source}": [anybody, sender], f"recv_object_list-{source}": parcel})
    some = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        one = mine(2)
        dist.all_reduce(one, group=some)
        results["in a smaller group"] = one


alike()
if "one" not in options:
    unlike()
if "name" in options:
    name: list[Any] = [uuid.uuid4().hex if rank == 0 else None]
    dist.broadcast_object_list(name)
    results["name"] = name
if "number" in options:
    number = torch.rand(2) if rank == 0 else torch.zeros(2)
    dist.broadcast(number, 0)
    results["number"] = number
if "large" in options:
    large = torch.full((5_000_000,), float(rank + 1))
    dist.broadcast(large, 0)
    results["large"] = float(large.sum())
if "draws" in options:
    dist.all_reduce(torch.rand(1))
if not ("asks" in options and "HOLDFAST_FRESH" in os.environ):
    dist.all_reduce(torch.ones(1))

torch.manual_seed(1)
model = nn.Linear(8, 600_000 if "wide" in options else 4)
if "wide" in options:
    with torch.no_grad():
        model.weight.mul_(rank + 1)
    dist.broadcast(model.weight.data, 1)
written = False
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with holdfast.session(model=model, optimizer=optimizer, any_rank="any" in options) as session:
    wrapped = session.stabilize_ddp(nn.parallel.DistributedDataParallel(model, process_group=session.group))
    for step in session.steps(until=until):
        if f"gate={step.number}" in options:
            gate(folder)
        reach("forward", step.number)
        loss = wrapped(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.end(loss)
        if session.steps_done == step.number and not written:
            written = True
            (folder / f"result-{session.rank}.json").write_text(json.dumps({key: plain(one) for key, one in results.items()}))
        if "slow" in options:
            time.sleep(0.03)
        reach("committed", step.number)
        if "between" in options:
            dist.all_reduce(between := torch.ones(1))
            assert int(between) == ranks
if "wide" in options:
    results["model"] = float(model.weight.double().sum())
    (folder / f"result-{session.rank}.json").write_text(json.dumps({key: plain(one) for key, one in results.items()}))
