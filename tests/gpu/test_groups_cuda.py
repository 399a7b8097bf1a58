"""Managed groups on a GPU: the version gate, NCCL under a managed group, and state that goes through pinned memory.

The tests run on the CPU too, so that they stay valid where no GPU is available.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from holdfast.runtime.groups import state_transfer
from holdfast.runtime.groups.backends import BuildOptions, build
from holdfast.runtime.groups.nccl import nccl_can_abort
from holdfast.runtime.groups.operations import StepTransaction
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.state.training import Training

pytestmark = pytest.mark.gpu
on_both = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"))]
)
LONG = timedelta(minutes=5)


def test_versions_of_nccl_whose_abort_can_hang_are_rejected() -> None:
    """The gate of `holdfast.runtime.groups.backends`; it needs no GPU."""
    assert not nccl_can_abort((2, 28, 8))
    assert not nccl_can_abort((2, 27, 9))
    assert nccl_can_abort((2, 28, 9))
    assert nccl_can_abort((3, 0, 0))


@on_both
def test_collectives_go_through_the_library_of_their_device(device: str) -> None:
    """One rank with its own device: the operation runs, the backend can be replaced, and an abandoned group changes nothing."""
    if device == "cuda" and not nccl_can_abort(tuple(torch.cuda.nccl.version())):
        pytest.skip("the NCCL of this GPU is older than the gate allows")
    devices = ("cpu", "cuda") if device == "cuda" else ("cpu",)
    store = dist.HashStore()
    group = ManagedGroup("g", [0], 0, StepTransaction(), LONG)
    for turn in range(2):
        inner = build(
            store,
            f"turn-{turn}",
            0,
            1,
            options=BuildOptions(devices=devices, timeout=LONG, host="127.0.0.1", first=turn == 0),
            is_cancelled=lambda: False,
        )
        before = group.replace_backend(inner, {0: turn})
        if before is not None:
            before.close()
        here = torch.full((4,), 3.0, device=device)
        group.allreduce([here]).wait()
        assert here.tolist() == [3.0] * 4
        assert not group.transaction.lost
    group.abandon("over")
    there = torch.ones(4, device=device)
    group.allreduce([there]).wait()
    assert there.tolist() == [1.0] * 4
    assert group.transaction.lost


def _move(rank: int, port: int, folder: str, device: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    inner = build(
        store, "pair", rank, 2, options=BuildOptions(devices=("cpu",), timeout=LONG, host="127.0.0.1"), is_cancelled=lambda: False
    )
    torch.manual_seed(1)
    images = torch.randn(2, 3, 5, 7, device=device).to(memory_format=torch.channels_last)
    tensors = [
        torch.randn(9_000_000, device=device),
        torch.arange(7, device=device),
        torch.randn(3, 5, device=device).bfloat16().t(),
        images,
    ]
    if rank == 0:
        digest, size = state_transfer.send(inner, 1, tensors, 0, 1)
    else:
        for one in tensors:
            one.zero_()
        ((digest, size),) = state_transfer.finish([state_transfer.receive(inner, 0, tensors, 0, 1)])
    sums: list[Any] = [one.double().sum().item() for one in tensors]
    Path(folder, str(rank)).write_text(repr((digest, size, sums)))
    inner.close()


@on_both
def test_state_arrives_as_it_was_sent(tmp_path: Path, device: str) -> None:
    """Two processes on one device, a GPU through pinned memory: the received state has the digest of the sent one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(_move, args=(port, str(tmp_path), device), nprocs=2, join=True)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@on_both
@pytest.mark.parametrize("settings", [{"fused": True}, {"capturable": True}, {"foreach": True}], ids=str)
def test_an_optimizer_that_counts_on_its_device_continues_there(device: str, settings: dict[str, Any]) -> None:
    """Its state is transferred to a new process; both take the same step after that."""
    if device == "cpu":
        settings = {name: value for name, value in settings.items() if name != "capturable"}  # torch supports that on GPUs only
    trainings = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        if seed == 0:
            model(torch.ones(2, 4, device=device)).sum().backward()
            optimizer.step()
        trainings.append(Training(model=model, optimizers=[optimizer]))
    tensors, rest = trainings[0].transferable_state()
    trainings[1].load_state(rest, {key: one.clone() for key, one in tensors.items()})
    results = []
    for one in trainings:
        one.optimizers[0].zero_grad()
        one.model(torch.ones(2, 4, device=device)).sum().backward()
        one.optimizers[0].step()
        states = [state["step"] for state in one.optimizers[0].state.values()]
        results.append(([value.tolist() for value in one.model.state_dict().values()], [(step.item(), step.device) for step in states]))
    assert results[0] == results[1]
