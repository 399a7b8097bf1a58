# ruff: noqa: D103 (an operation's name says all)
"""Every operation of `torch.distributed`, through a managed group and through stock gloo: writes down where they differ."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import holdfast
from holdfast.runtime.groups import membership
from holdfast.runtime.groups.process_group import ManagedGroup

folder = Path(sys.argv[1])
torch.set_num_threads(1)
holdfast.join()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Group = dist.ProcessGroup
OPERATIONS: list[Callable[[Group], Any]] = []


def mine(*shape: int, add: float = 0.0) -> Tensor:
    """Return numbers that differ on every rank and in every place."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 10.0 * (rank + 1) + add


def empty(*shape: int) -> list[Tensor]:
    """Return room for one tensor of each rank."""
    return [torch.zeros(shape) for _ in range(ranks)]


def operation(call: Callable[[Group], Any]) -> Callable[[Group], Any]:
    """Enter *call* into the list."""
    OPERATIONS.append(call)
    return call


def reductions(kind: dist.ReduceOp.RedOpType) -> None:
    """Enter the reductions of one *kind*."""

    def all_reduce(group: Group) -> Any:
        one = mine(2, 3)
        dist.all_reduce(one, kind, group)
        return one

    def reduce(group: Group) -> Any:
        one = mine(4)
        dist.reduce(one, 1, kind, group)
        return one if rank == 1 else None

    def reduce_scatter_tensor(group: Group) -> Any:
        out = torch.zeros(2, 3)
        dist.reduce_scatter_tensor(out, mine(2 * ranks, 3), kind, group)
        return out

    def reduce_scatter(group: Group) -> Any:
        out = torch.zeros(3)
        dist.reduce_scatter(out, [mine(3, add=number) for number in range(ranks)], kind, group)
        return out

    for one in (all_reduce, reduce, reduce_scatter_tensor, reduce_scatter):
        one.__name__ += f"_{str(kind).rpartition('.')[2]}"
        operation(one)


for kind in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
    reductions(kind)


@operation
def all_reduce_later(group: Group) -> Any:
    one, other = mine(3), mine(5)
    works = [dist.all_reduce(part, group=group, async_op=True) for part in (one, other)]
    for work in works:
        work.wait()
    return [one, other, [work.is_completed() for work in works]]


@operation
def all_reduce_future(group: Group) -> Any:
    one = mine(3)
    future = dist.all_reduce(one, group=group, async_op=True).get_future()
    return [part.clone() for part in future.wait()]


def shapes(value: Any) -> Any:
    """Return the shapes in a result, as it is nested."""
    return list(value.shape) if isinstance(value, Tensor) else [shapes(one) for one in value]


@operation
def futures(group: Group) -> Any:
    whole, parts = mine(2 * ranks), [mine(2) for _ in range(ranks)]
    works = [
        dist.broadcast(mine(2), 1, group, async_op=True),
        dist.reduce(mine(2), 1, group=group, async_op=True),
        dist.all_gather(empty(2), mine(2), group, async_op=True),
        dist.all_gather_into_tensor(whole, mine(2), group, async_op=True),
        dist.all_to_all_single(whole.clone(), whole, group=group, async_op=True),
        dist.scatter(mine(2), parts if rank == 1 else None, 1, group, async_op=True),
    ]
    return [shapes(work.get_future().wait()) for work in works]


@operation
def all_reduce_integers(group: Group) -> Any:
    one = torch.tensor([rank, 7], dtype=torch.int64)
    dist.all_reduce(one, group=group)
    return one


@operation
def all_reduce_half(group: Group) -> Any:
    one = mine(3).bfloat16()
    dist.all_reduce(one, group=group)
    return one.float()


@operation
def all_reduce_coalesced(group: Group) -> Any:
    tensors = [mine(3), mine(2, 2)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


@operation
def broadcast(group: Group) -> Any:
    one = mine(2, 2)
    dist.broadcast(one, 1, group)
    return one


@operation
def all_gather(group: Group) -> Any:
    found = empty(2, 2)
    dist.all_gather(found, mine(2, 2), group)
    return found


@operation
def all_gather_coalesced(group: Group) -> Any:
    found = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(ranks)]
    dist.all_gather_coalesced(found, [mine(3), mine(2, 2)], group)
    return found


@operation
def all_gather_into_tensor(group: Group) -> Any:
    found = torch.zeros(2 * ranks, 3)
    dist.all_gather_into_tensor(found, mine(2, 3), group)
    return found


@operation
def all_to_all(group: Group) -> Any:
    found = empty(2)
    dist.all_to_all(found, [mine(2, add=100.0 * number) for number in range(ranks)], group)
    return found


@operation
def all_to_all_single(group: Group) -> Any:
    found = torch.zeros(2 * ranks)
    dist.all_to_all_single(found, mine(2 * ranks), group=group)
    return found


@operation
def all_to_all_single_uneven(group: Group) -> Any:
    out, given = [source + 1 for source in range(ranks)], [rank + 1] * ranks
    found = torch.zeros(sum(out))
    dist.all_to_all_single(found, mine(sum(given)), out, given, group)
    return found


@operation
def gather(group: Group) -> Any:
    found = empty(3) if rank == 1 else None
    dist.gather(mine(3), found, 1, group)
    return found


@operation
def scatter(group: Group) -> Any:
    found = torch.zeros(3)
    dist.scatter(found, [mine(3, add=number) for number in range(ranks)] if rank == 1 else None, 1, group)
    return found


@operation
def send_and_receive(group: Group) -> Any:
    one = mine(3)
    if rank == 0:
        dist.send(one, 1, group, tag=3)
    elif rank == 1:
        dist.recv(one, 0, group, tag=3)
    return one


@operation
def around_the_ring(group: Group) -> Any:
    one = torch.zeros(3)
    works = [dist.isend(mine(3), (rank + 1) % ranks, group), dist.irecv(one, (rank - 1) % ranks, group)]
    for work in works:
        assert work is not None
        work.wait()
    return one


@operation
def batch(group: Group) -> Any:
    one = torch.zeros(3)
    wanted = [dist.P2POp(dist.isend, mine(3), (rank + 1) % ranks, group), dist.P2POp(dist.irecv, one, (rank - 1) % ranks, group)]
    for work in dist.batch_isend_irecv(wanted):
        work.wait()
    return one


@operation
def barrier(group: Group) -> Any:
    dist.barrier(group)
    return "there"


@operation
def objects(group: Group) -> Any:
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, {"rank": rank}, group)
    sent: list[Any] = [f"from {rank}", rank]
    dist.broadcast_object_list(sent, 1, group)
    gathered: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(rank, gathered, 0, group)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {number}" for number in range(ranks)] if rank == 0 else None, 0, group)
    return [everybody, sent, gathered, scattered]


@operation
def objects_from_one_to_another(group: Group) -> Any:
    sent: list[Any] = [f"from {rank}", {"rank": rank}]
    if rank == 0:
        dist.send_object_list(sent, 1, group)
    elif rank == 1:
        dist.recv_object_list(sent, 0, group)
    return sent


@operation
def coalesced_reductions(group: Group) -> Any:
    tensors = [mine(3), mine(2, 2)]
    with _coalescing_manager(group):
        for one in tensors:
            dist.all_reduce(one, group=group)
    return tensors


@operation
def coalesced_gathering(group: Group) -> Any:
    found = [torch.zeros(3 * ranks), torch.zeros(2 * ranks)]
    with _coalescing_manager(group):
        dist.all_gather_into_tensor(found[0], mine(3), group)
        dist.all_gather_into_tensor(found[1], mine(2), group)
    return found


@operation
def functional_reductions(group: Group) -> Any:
    one = functional.all_reduce(mine(3), "sum", group) + 0
    return [one, functional.reduce_scatter_tensor(mine(2 * ranks, 2), "sum", 0, group) + 0]


@operation
def functional_gathering(group: Group) -> Any:
    return [functional.all_gather_tensor(mine(2, 3), dim, group) + 0 for dim in (0, 1)]


@operation
def functional_exchange(group: Group) -> Any:
    return [functional.broadcast(mine(3), 1, group) + 0, functional.all_to_all_single(mine(2 * ranks), None, None, group) + 0]


@operation
def functional_coalesced(group: Group) -> Any:
    one = functional.all_reduce_coalesced([mine(3), mine(2)], "sum", group)
    two = functional.all_gather_into_tensor_coalesced([mine(3), mine(2)], group)
    three = functional.reduce_scatter_tensor_coalesced([mine(2 * ranks), mine(ranks)], "sum", [0, 0], group)
    return [part + 0 for part in [*one, *two, *three]]


@operation
def functional_in_a_selective_checkpoint(group: Group) -> Any:
    """Keep a result for the backward pass: the end of a wait for it is no change."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    def part(given: Tensor) -> Any:
        return functional.reduce_scatter_tensor_autograd(given, "sum", 0, group).square().sum()

    one = mine(2 * ranks, 2).requires_grad_()
    checkpoint(part, one, use_reentrant=False, context_fn=contexts).backward()
    return one.grad


@operation
def functional_with_gradients(group: Group) -> Any:
    one = mine(2, 3).requires_grad_()
    functional.all_gather_tensor_autograd(one, 0, group).square().sum().backward()
    return one.grad


def plain(value: Any) -> Any:
    """Return *value* as JSON holds it."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def tried(call: Callable[[Group], Any], group: Group) -> Any:
    """Return what *call* gives, or the kind of error that it ends with."""
    try:
        return plain(call(group))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"error: {error}"


world = dist.group.WORLD
assert world is not None
manager = membership.installed()
membership.install(None)  # a group of torch's own, to compare with
stock = dist.new_group(backend="gloo")
membership.install(manager)
found = {call.__name__: [tried(call, world), tried(call, stock)] for call in OPERATIONS}
kinds = [dist.get_backend(world), dist.get_backend(stock)]
dist.barrier()
assert isinstance(world, ManagedGroup)
world.transaction.final = False  # as within a step
world.abandon("the test broke it")
broken = [tried(futures, world), found["futures"][1]]
(folder / f"result-{rank}.json").write_text(json.dumps({"kinds": kinds, "found": found, "broken": broken}))
