"""Ranks in a data x pipeline grid, on a device: gradients are reduced in backward over both, pairs exchange messages, fused AdamW applies.

All groups that compute have two members, so that no sum depends on the order of ranks.

Options: ``on=KIND`` (see `RankDevice`; by default the stand-in), ``ddp`` (DDP reduces the gradients, over all ranks at once), ``item`` (the
loss is read as `Tensor.item` does), ``gate-N-R`` (rank R waits at step N for the gate), ``captures-N`` (every rank tries to capture a graph
at step N). Of the stand-in alone: ``silent`` (no communicator reports an error), ``refuses-N-R`` (the library takes no operation of rank R
at step N, once), ``blocks-N-R`` (a call of rank R that starts an operation does not return, at step N), ``stuck-R`` (no abort of rank R
ends, from step 13 on), ``late-R`` (the device of rank R comes to what follows the vote of a migration only after `LATE` seconds).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import batch_isend_irecv  # by name, as many do, before anything of ours is set up
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups import backends, device_library, migration
from holdfast.runtime.snapshots.device_runtime import CapturedStep
from tests.runtime.chaos import gate, reach
from tests.runtime.rank_device import RankDevice

LATE = 2.0
folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])

where = RankDevice(options, default="stand-in", reports_errors="silent" not in options)
device = where.stand_in
holdfast.join()
rank = int(os.environ["RANK"])
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(where.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
# As in torch, a group for nccl carries tensors of the device only; the default group has gloo as well.
copies = [dist.new_group([0, 2], backend=where.backend), dist.new_group([1, 3], backend=where.backend)][rank % 2]
pair = [dist.new_group([0, 1], backend=where.backend), dist.new_group([2, 3], backend=where.backend)][rank // 2]
torch.manual_seed(100 + rank)
source = torch.Generator().manual_seed(5)
dataset = TensorDataset(torch.randn(160, 8, generator=source), torch.randn(160, 4, generator=source))
loader = holdfast.Loader(DataLoader(dataset, 8, sampler=DistributedSampler(dataset, 4, rank, seed=3), drop_last=True))


def reduce(parameter: Tensor) -> None:
    """Sum a gradient over all ranks, in two steps that the device runs one after the other."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad, group=copies)
    dist.all_reduce(parameter.grad, group=pair)


forward: nn.Module = model
if "ddp" not in options:
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(reduce)


def exchange(number: int) -> Tensor:
    """Send a message to the other rank of the pair, and receive one, as the stages of a pipeline do: both send first."""
    sent, received = torch.full((9000,), float(number + rank), device=where.device), torch.empty(9000, device=where.device)
    batch = [dist.P2POp(dist.isend, sent, rank ^ 1, pair), dist.P2POp(dist.irecv, received, rank ^ 1, pair)]
    for work in batch_isend_irecv(batch):
        work.wait()
    return received


def report_blocked() -> None:
    """Report that a call of this rank blocks, as soon as it does."""
    assert device is not None
    device.blocked.wait()
    link().report("in the library")


def report_ends() -> None:
    """Have this rank report when it aborts a communicator first, and when it exits as a rank that has migrated."""
    assert device is not None
    made, leave = device.communicators, os._exit

    def report_abort() -> None:
        while not any(one.aborted.is_set() for one in made):
            time.sleep(0.001)
        link().report("aborts", at=time.monotonic())

    def report_exit(status: int) -> None:
        link().report("exits", at=time.monotonic())
        link().flush(10.0)
        leave(status)

    threading.Thread(target=report_abort, daemon=True).start()
    os._exit = report_exit  # type: ignore[assignment]


def be_late() -> None:
    """Have the device of this rank stand still for a while, and report when it goes on."""
    assert device is not None
    stalled = device.stall()

    def go_on() -> None:
        link().report("goes on", at=time.monotonic())
        stalled.set()

    threading.Timer(LATE, go_on).start()


def try_to_capture() -> None:
    """Try to capture a graph with a collective, with a batch of messages, and with the optimizer's step; nothing of it may run."""
    captured, refused = torch.ones(1, device=where.device), []
    where.synchronize()
    with where.capture():
        captured += 1
        for part in (lambda: pair.allreduce([captured]), lambda: exchange(0), optimizer.step):
            try:
                part()
            except CapturedStep as error:
                refused.append(error.what)
    link().report("refused", captures=refused)


with holdfast.session(model=model, optimizer=optimizer, data=loader) as session:
    if "ddp" in options:
        # DDP computes on the host with what it receives, where a GPU's queue would do that: so it receives nothing but gradients.
        forward = nn.parallel.DistributedDataParallel(
            model, init_sync=False, broadcast_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True
        )
    if any(one.startswith("late-") for one in options):
        report_ends()
        vars(backends)["FINISH_SECONDS"] = vars(migration)["FINISH_SECONDS"] = 60.0
    batches = iter(loader)
    for step in session.steps(until=until):
        if f"gate-{step.number}-{rank}" in options:
            link().report("at the gate")
            gate(folder)
        if f"refuses-{step.number}-{rank}" in options:
            options.discard(f"refuses-{step.number}-{rank}")
            assert device is not None
            device.refuses = True
        if f"blocks-{step.number}-{rank}" in options and os.environ["HOLDFAST_GENERATION"] == "1":
            assert device is not None
            vars(device_library).update(CALL_SECONDS=0.1, ABORT_SECONDS=3.0)
            threading.Thread(target=report_blocked, daemon=True).start()
            device.launches.clear()
        if step.number == 13 and f"stuck-{rank}" in options:
            assert device is not None
            vars(device_library)["ABORT_SECONDS"] = 0.5
            device.hangs.clear()
        if f"captures-{step.number}" in options:
            try_to_capture()
        inputs, wanted = (one.to(where.device) for one in next(batches))
        received = exchange(step.number)
        if device is not None:
            device.refuses = False
        reach("forward", step.number)
        loss = nn.functional.mse_loss(forward(inputs), wanted)
        loss.backward()
        reach("backward", step.number)
        reported = loss.detach().clone()
        dist.all_reduce(reported, group=copies)
        dist.all_reduce(reported, group=pair)
        if "item" in options:
            where.synchronize()
        optimizer.step()  # this waits for the device: all that lies in its queue has arrived, or the step does not count
        optimizer.zero_grad()
        if f"late-{rank}" in options and session._recovery is not None and session._recovery.agreed.switch:
            be_late()
        step.end(reported / 4)
        if session.steps_done == step.number:
            assert received.unique().tolist() == [float(step.number + (rank ^ 1))]
    dist.barrier(pair)  # of a group without gloo: the device runs it

dist.destroy_process_group(pair)
if device is not None:
    made = device.communicators
    assert any(one.finished.is_set() for one in made)
    link().report(
        "device",
        communicators=len(made),
        aborted=sum(one.ended.is_set() for one in made),
        batches=sorted({size for one in made for size in one.batches}),
    )
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().cpu().numpy().tobytes())
ending = {"step": session.steps_done, "loss": session.loss, "model": digest.hexdigest(), "prepared": device and device.prepared}
(folder / f"result-{rank}.json").write_text(json.dumps(ending))
