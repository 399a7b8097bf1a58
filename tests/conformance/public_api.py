# mypy: ignore-errors
"""Tests of the libraries over process groups, written from the public API: PyTorch's own files for them are not part of its package.

Every test runs over stock gloo as well, and says nothing of Holdfast. It compares with a computation without any group.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase

from tests.conformance.reductions import differences

RANKS: Final = 4
STEPS: Final = 3


class Mlp(nn.Module):
    """Two layers with a buffer, and one more that only some calls use."""

    def __init__(self, width: int = 8, *, optional: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 16), nn.Linear(16, width)
        self.third = nn.Linear(width, width) if optional else None
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, given: Tensor, *, whole: bool = True) -> Tensor:
        """Return the output; without the third layer unless *whole*."""
        self.calls += 1
        out: Tensor = self.second(torch.relu(self.first(given)))
        return self.third(out) if self.third is not None and whole else out


def batch(step: int, width: int = 8) -> Tensor:
    """Return the whole batch of a *step*, the same on every rank."""
    return torch.randn(RANKS * 2, width, generator=torch.Generator().manual_seed(100 + step))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model that is the same on every rank."""
    torch.manual_seed(7)
    return make()


def trained(model: nn.Module, **options: Any) -> nn.Module:
    """Return a copy of *model* after some steps with the whole batch, without any group."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step), **options).square().mean().backward()
        optimizer.step()
    return model


class PublicApi(MultiProcessTestCase):
    """One test of one library each."""

    rank: int
    file_name: str

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return RANKS

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **_more: Any) -> None:
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        self.init()
        self.run_test(test_name, parent_pipe)

    def init(self, suffix: str = "") -> None:
        """Make the default group."""
        method = f"file://{self.file_name}{suffix}"
        dist.init_process_group("gloo", init_method=method, rank=self.rank, world_size=RANKS, timeout=timedelta(seconds=60))

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a batch."""
        return whole.chunk(RANKS)[self.rank]

    def same_everywhere(self, one: Tensor) -> None:
        """Check that all ranks hold the same."""
        found = [torch.empty_like(one) for _ in range(RANKS)]
        dist.all_gather(found, one.contiguous())
        for other in found:
            self.assertEqual(other, one, rtol=0, atol=0)

    def train(self, model: Any, optimizer: Any = None) -> None:
        """Train *model* on this rank's parts of the batches."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(self.mine(batch(step))).square().mean().backward()
            optimizer.step()

    def equal_parameters(self, model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
        """Check the parameters of *model*, sharded or not, against those of *reference*."""
        expected = dict(reference.named_parameters())
        for name, one in model.named_parameters():
            value = one.full_tensor() if isinstance(one, DTensor) else one
            self.assertEqual(value.detach(), expected[name.removeprefix("module.")].detach(), **tolerance)

    # -- operations ---------------------------------------------------------------------------------------------------

    def test_reductions(self) -> None:
        """Every operation, element type and collective."""
        _, wrong = differences(dist.group.WORLD)
        self.assertEqual(wrong, [])

    def test_work(self) -> None:
        """Works are waited for in any order, report whether they have completed, and give a future with the result."""
        tensors = [torch.full((3,), float(self.rank + number)) for number in range(8)]
        works = [dist.all_reduce(one, async_op=True) for one in tensors]
        for work in reversed(works):
            self.assertTrue(work.wait())
        for number, (one, work) in enumerate(zip(tensors, works, strict=True)):
            self.assertTrue(work.is_completed())
            self.assertTrue(work.is_success())
            self.assertEqual(one, torch.full((3,), float(sum(range(RANKS)) + number * RANKS)))
        one = torch.ones(2)
        chained = dist.all_reduce(one, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
        self.assertEqual(chained.wait(), torch.full((2,), 2.0 * RANKS))

    def test_error_in_work(self) -> None:
        """A call that cannot work raises in its caller, and the group is as usable as before."""
        with self.assertRaises(RuntimeError):
            dist.all_reduce(torch.ones(2, dtype=torch.int16))
        with self.assertRaises((RuntimeError, ValueError)):
            dist.all_gather_into_tensor(torch.empty(RANKS * 2 + 1), torch.ones(2))
        one = torch.ones(1)
        dist.all_reduce(one)
        self.assertEqual(one.item(), RANKS)

    def test_receive_from_anybody(self) -> None:
        """The sender's rank is returned; objects from a known rank."""
        if self.rank == 0:
            senders = []
            for _ in range(RANKS - 1):
                one = torch.zeros(1)
                senders.append(dist.recv(one))
                self.assertEqual(one.item(), float(senders[-1]))
            self.assertEqual(sorted(senders), [1, 2, 3])
        else:
            dist.send(torch.tensor([float(self.rank)]), 0)
        dist.barrier()
        objects = [None, None]
        if self.rank == 2:
            self.assertEqual(dist.recv_object_list(objects, 1), 1)
            self.assertEqual(objects, ["one", {"two": 2}])
        elif self.rank == 1:
            dist.send_object_list(["one", {"two": 2}], 2)

    def test_tags(self) -> None:
        """Messages with different tags pass each other."""
        first, second = torch.ones(1), torch.full((1,), 2.0)
        if self.rank == 0:
            works = [dist.isend(first, 1, tag=5), dist.isend(second, 1, tag=6)]
        elif self.rank == 1:
            first, second = torch.zeros(1), torch.zeros(1)
            works = [dist.irecv(second, 0, tag=6), dist.irecv(first, 0, tag=5)]
        else:
            works = []
        for work in works:
            work.wait()
        self.assertEqual((first.item(), second.item()), (1.0, 2.0))

    def test_batch_of_messages(self) -> None:
        """Every rank sends to and receives from all others in one batch."""
        found = [torch.zeros(2) for _ in range(RANKS)]
        others = [rank for rank in range(RANKS) if rank != self.rank]
        wanted = [dist.P2POp(dist.irecv, found[peer], peer) for peer in others]
        wanted += [dist.P2POp(dist.isend, torch.full((2,), float(10 * self.rank + peer)), peer) for peer in others]
        for work in dist.batch_isend_irecv(wanted):
            work.wait()
        for peer in others:
            self.assertEqual(found[peer], torch.full((2,), float(10 * peer + self.rank)))

    def test_coalesced(self) -> None:
        """Operations that are collected and started together, waited for at once or later."""
        sums, gathered = [torch.full((2,), float(self.rank)) for _ in range(3)], torch.zeros(RANKS)
        with _coalescing_manager(async_ops=True) as manager:
            for one in sums:
                dist.all_reduce(one)
        manager.wait()
        with _coalescing_manager():
            dist.all_gather_into_tensor(gathered, torch.tensor([float(self.rank)]))
        part = torch.zeros(1)
        with _coalescing_manager():
            dist.reduce_scatter_tensor(part, torch.arange(float(RANKS)))
        self.assertEqual(sums, [torch.full((2,), 6.0)] * 3)
        self.assertEqual(gathered, torch.arange(float(RANKS)))
        self.assertEqual(part.item(), float(self.rank * RANKS))

    def test_all_to_all(self) -> None:
        """Lists of tensors, and one tensor with splits."""
        found = [torch.zeros(3) for _ in range(RANKS)]
        dist.all_to_all(found, [torch.full((3,), float(10 * self.rank + peer)) for peer in range(RANKS)])
        self.assertEqual(found, [torch.full((3,), float(10 * peer + self.rank)) for peer in range(RANKS)])
        out = torch.zeros(sum(range(1, RANKS + 1)))
        dist.all_to_all_single(
            out, torch.full((RANKS * (self.rank + 1),), float(self.rank)), list(range(1, RANKS + 1)), [self.rank + 1] * RANKS
        )
        self.assertEqual(out, torch.cat([torch.full((peer + 1,), float(peer)) for peer in range(RANKS)]))

    def test_objects(self) -> None:
        """All functions that send pickled objects."""
        gathered: list[Any] = [None] * RANKS
        dist.all_gather_object(gathered, {"rank": self.rank})
        self.assertEqual(gathered, [{"rank": rank} for rank in range(RANKS)])
        sent: list[Any] = [f"from {self.rank}", self.rank]
        dist.broadcast_object_list(sent, 2)
        self.assertEqual(sent, ["from 2", 2])
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, [f"for {rank}" for rank in range(RANKS)] if self.rank == 1 else None, 1)
        self.assertEqual(scattered, [f"for {self.rank}"])
        collected: list[Any] | None = [None] * RANKS if self.rank == 3 else None
        dist.gather_object(self.rank, collected, 3)
        self.assertEqual(collected, [0, 1, 2, 3] if self.rank == 3 else None)

    def test_sparse(self) -> None:
        """A sum of sparse tensors."""
        one = torch.sparse_coo_tensor(torch.tensor([[self.rank]]), torch.ones(1), (RANKS,))
        dist.all_reduce(one)
        self.assertEqual(one.to_dense(), torch.ones(RANKS))

    def test_monitored_barrier(self) -> None:
        """It passes, and names ranks that do not come."""
        dist.monitored_barrier()
        half = dist.new_group([0, 1])
        rest = dist.new_group([2, 3])
        group = half if self.rank < 2 else rest
        if self.rank in {0, 2}:
            with self.assertRaisesRegex(RuntimeError, "Ranks? 1 failed to pass monitoredBarrier"):
                dist.monitored_barrier(group, timeout=timedelta(seconds=0.5), wait_all_ranks=self.rank == 2)
        dist.barrier()

    def test_gradients_through_collectives(self) -> None:
        """`torch.distributed.nn.functional` and the functional collectives with gradients."""
        one = torch.full((2,), float(self.rank + 1), requires_grad=True)
        torch.distributed.nn.functional.all_reduce(one).square().sum().backward()
        self.assertEqual(one.grad, torch.full((2,), 2.0 * 10 * RANKS))
        two = torch.ones(2, requires_grad=True)
        functional.all_gather_tensor_autograd(two, 0, dist.group.WORLD).mul(float(self.rank)).sum().backward()
        self.assertEqual(two.grad, torch.full((2,), 6.0))
        three = torch.arange(float(RANKS), requires_grad=True)
        functional.all_to_all_single_autograd(three, None, None, dist.group.WORLD).mul(float(self.rank + 1)).sum().backward()
        self.assertEqual(three.grad, torch.arange(1.0, RANKS + 1))

    def test_compiled_collectives(self) -> None:
        """Functional collectives in a graph without breaks."""

        def exchange(one: Tensor) -> Tensor:
            total = functional.all_reduce(one, "sum", dist.group.WORLD)
            parts = functional.all_gather_tensor(total * 2, 0, dist.group.WORLD)
            return functional.reduce_scatter_tensor(parts, "avg", 0, dist.group.WORLD) + 1

        found = torch.compile(exchange, backend="aot_eager", fullgraph=True)(torch.full((2,), float(self.rank)))
        self.assertEqual(found, torch.full((2,), 13.0))

    # -- groups -------------------------------------------------------------------------------------------------------

    def test_groups(self) -> None:
        """Groups of some ranks, made by all or by their members alone, in the caller's order, with a description."""
        pair = dist.new_group([0, 1] if self.rank < 2 else [2, 3], use_local_synchronization=True, group_desc="pair")
        one = torch.tensor([float(self.rank)])
        dist.all_reduce(one, group=pair)
        self.assertEqual(one.item(), 1.0 if self.rank < 2 else 5.0)
        self.assertEqual(pair.group_desc, "pair")
        mine, every = dist.new_subgroups(2)
        self.assertEqual(dist.get_process_group_ranks(mine), [0, 1] if self.rank < 2 else [2, 3])
        self.assertEqual(len(every), 2)
        crossed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        self.assertEqual(dist.get_group_rank(crossed, self.rank), self.rank // 2)
        self.assertEqual(dist.get_global_rank(crossed, 1), self.rank % 2 + 2)
        self.assertEqual(dist.get_world_size(crossed), 2)
        if self.rank < 3:
            self.assertEqual(pair.size(), 2)

    def test_group_made_again(self) -> None:
        """A destroyed group of the same ranks, under the same name."""
        for _ in range(3):
            pair = dist.new_group([0, 1] if self.rank < 2 else [2, 3], timedelta(seconds=5), use_local_synchronization=True)
            one = torch.ones(1)
            dist.all_reduce(one, group=pair)
            self.assertEqual(one.item(), 2.0)
            dist.barrier()
            dist.destroy_process_group(pair)

    def test_all_groups_made_again(self) -> None:
        """The default group and one below it, after all have been destroyed."""
        for again in range(2):
            dist.barrier()
            dist.destroy_process_group()
            self.assertFalse(dist.is_initialized())
            self.init(f"-{again}")
            for group in (None, dist.new_group()):
                one = torch.ones(1)
                dist.all_reduce(one, group=group)
                self.assertEqual(one.item(), RANKS)

    def test_not_a_member(self) -> None:
        """Ranks outside of a group get a placeholder and no answer."""
        group = dist.new_group([1, 2])
        if self.rank in {1, 2}:
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            self.assertEqual(one.item(), 2.0)
        else:
            self.assertEqual(dist.get_rank(group), -1)
            self.assertIsNone(dist.barrier(group))
        dist.barrier()  # the store lives in rank 0, as torch's own does

    # -- DDP ----------------------------------------------------------------------------------------------------------

    def test_ddp(self) -> None:
        """As in one process; with a static graph, gradients as views, and small buckets as well."""
        reference = trained(seeded(Mlp))
        for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}):
            model = DistributedDataParallel(seeded(Mlp), **options)  # type: ignore[arg-type]
            self.train(model)
            self.equal_parameters(model, reference)
            self.same_everywhere(model.module.first.weight.detach())

    def test_ddp_unused_parameters(self) -> None:
        """Layers that a step does not use, found in every step."""
        model = DistributedDataParallel(seeded(lambda: Mlp(optional=True)), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reference = seeded(lambda: Mlp(optional=True))
        expected = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(STEPS):
            for one, by, given in ((model, optimizer, self.mine(batch(step))), (reference, expected, batch(step))):
                by.zero_grad()
                one(given, whole=step != 1).square().mean().backward()
                by.step()
        self.equal_parameters(model, reference)

    def test_ddp_no_sync(self) -> None:
        """Gradients of two micro-batches, sent once."""
        model, reference = DistributedDataParallel(seeded(Mlp)), seeded(Mlp)
        with model.no_sync():
            model(self.mine(batch(0))).square().mean().backward()
        model(self.mine(batch(1))).square().mean().backward()
        for step in (0, 1):
            reference(batch(step)).square().mean().backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            self.assertEqual(one.grad, other.grad)

    def test_ddp_uneven_inputs(self) -> None:
        """Ranks with fewer batches join those with more."""
        model = DistributedDataParallel(seeded(Mlp))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        steps = 0
        with Join([model, optimizer]):
            for step in range(2 + self.rank):
                optimizer.zero_grad()
                model(self.mine(batch(step))).square().mean().backward()
                optimizer.step()
                steps += 1
        self.assertEqual(steps, 2 + self.rank)
        self.same_everywhere(model.module.first.weight.detach())

    def test_ddp_hooks(self) -> None:
        """Communication hooks: compressed, with PowerSGD, and one of the user's own."""

        def own(_state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 (DDP refuses annotations that are texts)
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0].div_(RANKS))

        reference = trained(seeded(Mlp))
        power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.5)
        hooks = ((None, own, 1e-5), (None, default_hooks.allreduce_hook, 1e-5), (None, default_hooks.fp16_compress_hook, 1e-2),
                 (power, powerSGD_hook.powerSGD_hook, 0.2))  # fmt: skip
        for state, hook, tolerance in hooks:
            model = DistributedDataParallel(seeded(Mlp))
            model.register_comm_hook(state, hook)
            self.train(model)
            self.equal_parameters(model, reference, rtol=tolerance, atol=tolerance)
            self.same_everywhere(model.module.first.weight.detach())

    def test_ddp_compiled(self) -> None:
        """A compiled module under DDP, with the graph split at its buckets."""
        model = DistributedDataParallel(seeded(Mlp))
        self.train(torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        self.equal_parameters(model, trained(seeded(Mlp)))

    def test_zero_redundancy_optimizer(self) -> None:
        """A sharded optimizer, and its state put together on one rank."""
        model = DistributedDataParallel(seeded(Mlp))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        self.train(model, optimizer)
        self.equal_parameters(model, trained(seeded(Mlp)))
        optimizer.consolidate_state_dict(to=1)
        if self.rank == 1:
            self.assertEqual(len(optimizer.state_dict()["state"]), len(list(model.parameters())))

    # -- FSDP ---------------------------------------------------------------------------------------------------------

    def _sharded(self, mesh: DeviceMesh, **options: Any) -> Any:
        model: Any = seeded(Mlp)
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def test_fsdp2(self) -> None:
        """`fully_shard`, with parameters gathered again in backward or kept, and on two dimensions."""
        reference = trained(seeded(Mlp))
        flat, grid = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        for mesh, options in ((flat, {}), (flat, {"reshard_after_forward": False}), (grid, {})):
            model = self._sharded(mesh, **options)
            self.train(model)
            self.equal_parameters(model, reference)

    def test_fsdp2_mixed_precision(self) -> None:
        """Computation in bfloat16, reduction in float32."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        model = self._sharded(init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
        self.train(model)
        self.equal_parameters(model, trained(seeded(Mlp)), rtol=5e-2, atol=5e-2)

    def test_fsdp2_accumulation_and_clipping(self) -> None:
        """Gradients of two micro-batches without and with reduction, then clipped by their norm."""
        model, reference = self._sharded(init_device_mesh("cpu", (RANKS,))), seeded(Mlp)
        for step in (0, 1):
            model.set_requires_gradient_sync(step == 1)
            model(self.mine(batch(step))).square().mean().backward()
            reference(batch(step)).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.01) for one in (model, reference)]
        self.assertEqual(norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0], norms[1])
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            self.assertEqual(one.grad.full_tensor(), other.grad)

    def test_fsdp1(self) -> None:
        """The older `FullyShardedDataParallel`, fully and partly sharded."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            model = FullyShardedDataParallel(seeded(Mlp), sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu"))
            self.train(model)
            with FullyShardedDataParallel.summon_full_params(model):
                expected = dict(trained(seeded(Mlp)).named_parameters())
                for name, one in model.named_parameters():
                    self.assertEqual(one.detach(), expected[name.replace("_fsdp_wrapped_module.", "")].detach())

    # -- meshes, tensors and models in parts ----------------------------------------------------------------------------

    def test_device_mesh(self) -> None:
        """Dimensions by name, their groups, slices, and flattened ones."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        self.assertEqual(mesh.get_coordinate(), [self.rank // 2, self.rank % 2])
        self.assertEqual(dist.get_process_group_ranks(mesh.get_group("model")), [self.rank // 2 * 2, self.rank // 2 * 2 + 1])
        one = torch.tensor([float(self.rank)])
        dist.all_reduce(one, group=mesh["data"].get_group())
        self.assertEqual(one.item(), float(2 * (self.rank % 2) + 2))
        flat = mesh["data", "model"]._flatten("all")
        two = torch.ones(1)
        dist.all_reduce(two, group=flat.get_group())
        self.assertEqual(two.item(), RANKS)
        self.assertEqual(DeviceMesh.from_group(mesh.get_group("data"), "cpu").size(), 2)

    def test_dtensor(self) -> None:
        """Redistribution between all placements, on one dimension and two; operators on shards."""
        mesh, whole = init_device_mesh("cpu", (RANKS,)), torch.arange(64.0).view(8, 8)
        for source in (Shard(0), Shard(1), Replicate()):
            for target in (Shard(0), Shard(1), Replicate()):
                moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
                self.assertEqual(moved.full_tensor(), whole)
        partial = DTensor.from_local(torch.ones(8, 8), mesh, [Partial()])
        self.assertEqual(partial.redistribute(mesh, [Shard(0)]).full_tensor(), torch.full((8, 8), float(RANKS)))
        average = DTensor.from_local(torch.full((4,), float(self.rank)), mesh, [Partial("avg")])
        self.assertEqual(average.full_tensor(), torch.full((4,), 1.5))
        grid = init_device_mesh("cpu", (2, 2))
        left, right = distribute_tensor(whole, grid, [Shard(0), Replicate()]), distribute_tensor(whole, grid, [Replicate(), Shard(1)])
        self.assertEqual((left @ right).full_tensor(), whole @ whole)
        self.assertEqual(distribute_tensor(whole, grid, [Shard(0), Shard(1)]).sum().full_tensor(), whole.sum())

    def test_tensor_parallel(self) -> None:
        """Column-wise and row-wise layers with sequence parallelism, alone and with FSDP2 on the other dimension."""
        reference = seeded(Mlp)
        reference(batch(0)).square().mean().backward()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        for sharded in (False, True):
            model: Any = parallelize_module(seeded(Mlp), mesh["model"], plan)
            given = batch(0)
            if sharded:
                fully_shard(model, mesh=mesh["data"])
                given = given.chunk(2)[self.rank // 2]
            model(given).square().mean().backward()
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                self.assertEqual(one.grad.full_tensor(), other.grad)
        norm = parallelize_module(nn.LayerNorm(8), mesh["model"], SequenceParallel(sequence_dim=0))
        out = norm(distribute_tensor(batch(0), mesh["model"], [Shard(0)]))
        self.assertEqual(out.full_tensor(), nn.functional.layer_norm(batch(0), (8,)))

    def _pipeline(self, schedule: type[Any], stages: int) -> None:
        layers = seeded(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(RANKS * stages))))
        reference = copy.deepcopy(layers)
        target = batch(9)

        def loss_of(out: Tensor, wanted: Tensor) -> Tensor:
            return (out - wanted).square().mean()

        mine = [self.rank + RANKS * number for number in range(stages)]
        parts = [PipelineStage(layers[place], place, RANKS * stages, torch.device("cpu")) for place in mine]
        runs = schedule(parts if stages > 1 else parts[0], n_microbatches=RANKS, loss_fn=loss_of)
        losses: list[Tensor] = []
        last = self.rank == RANKS - 1
        runs.step(*([batch(0)] if self.rank == 0 else []), **({"target": target, "losses": losses} if last else {}))
        loss_of(reference(batch(0)), target).backward()
        for place in mine:
            self.assertEqual(layers[place].weight.grad, reference[place].weight.grad)
        if last:
            self.assertEqual(torch.stack(losses).mean().detach(), loss_of(reference(batch(0)), target).detach())

    def test_pipeline_gpipe(self) -> None:
        """All micro-batches forward, then all backward."""
        self._pipeline(ScheduleGPipe, 1)

    def test_pipeline_1f1b(self) -> None:
        """One forward, one backward."""
        self._pipeline(Schedule1F1B, 1)

    def test_pipeline_interleaved(self) -> None:
        """Two stages a rank."""
        self._pipeline(ScheduleInterleaved1F1B, 2)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def test_distributed_checkpoint(self) -> None:
        """DCP: saved, saved in the background, loaded with another layout, and gathered on one rank."""
        place: list[Any] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(place)
        folder = Path(place[0])
        model = self._sharded(init_device_mesh("cpu", (RANKS,)))
        optimizer = torch.optim.AdamW(model.parameters())
        self.train(model, optimizer)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder / "now")
        dcp.async_save(state, checkpoint_id=folder / "later").result()
        for name in ("now", "later"):
            other = self._sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
            again = torch.optim.AdamW(other.parameters())
            loaded = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
            dcp.load(loaded, checkpoint_id=folder / name)
            set_state_dict(other, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            whole = [get_model_state_dict(one, options=StateDictOptions(full_state_dict=True)) for one in (model, other)]
            self.assertEqual(whole[0], whole[1], rtol=0, atol=0)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        self.assertEqual(len(full), 5 if self.rank == 0 else 0)
        torch.save(full, io.BytesIO())
