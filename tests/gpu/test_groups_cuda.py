"""Managed groups on a GPU: the version gate, NCCL under a managed group, and state that goes through pinned memory."""

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

from holdfast.runtime.groups import transfer
from holdfast.runtime.groups.attempt import Attempt
from holdfast.runtime.groups.inner import Way, build, nccl_can_abort
from holdfast.runtime.groups.managed import ManagedGroup

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
LONG = timedelta(minutes=5)


def test_an_nccl_that_can_hang_in_its_abort_is_known() -> None:
    """The gate of `holdfast.runtime.groups.inner`; it needs no GPU."""
    assert not nccl_can_abort((2, 28, 8))
    assert not nccl_can_abort((2, 27, 9))
    assert nccl_can_abort((2, 28, 9))
    assert nccl_can_abort((3, 0, 0))


@needs_gpu
def test_collectives_of_cuda_tensors_go_through_nccl() -> None:
    """One rank, a device of its own: the operation runs, and another group can be put under it."""
    if not nccl_can_abort(tuple(torch.cuda.nccl.version())):
        pytest.skip("this NCCL is older than the gate allows")
    store = dist.HashStore()
    group = ManagedGroup("g", [0], 0, Attempt(), LONG)
    for turn in range(2):
        inner = build(store, f"turn-{turn}", 0, 1, way=Way(devices=("cpu", "cuda"), timeout=LONG, host="127.0.0.1"), gave_up=lambda: False)
        before = group.give(inner, {0: turn})
        if before is not None:
            before.close()
        here = torch.full((4,), 3.0, device="cuda")
        group.allreduce([here]).wait()
        torch.cuda.synchronize()
        assert here.tolist() == [3.0] * 4
        assert not group.attempt.lost
    group.abandon("over")
    there = torch.ones(4, device="cuda")
    group.allreduce([there]).wait()
    assert there.tolist() == [0.0] * 4
    assert group.attempt.lost


def _move(rank: int, port: int, folder: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    inner = build(store, "pair", rank, 2, way=Way(devices=("cpu",), timeout=LONG, host="127.0.0.1"), gave_up=lambda: False)
    torch.manual_seed(1)
    tensors = [torch.randn(9_000_000, device="cuda"), torch.arange(7, device="cuda"), torch.randn(3, 5, device="cuda").bfloat16()]
    if rank == 0:
        told, size = transfer.send(inner, 1, tensors, 0, 1)
    else:
        for one in tensors:
            one.zero_()
        told, size = transfer.receive(inner, 0, tensors, 0, 1)()
    sums: list[Any] = [one.double().sum().item() for one in tensors]
    Path(folder, str(rank)).write_text(repr((told, size, sums)))
    inner.close()


@needs_gpu
def test_state_on_a_gpu_arrives_through_pinned_memory(tmp_path: Path) -> None:
    """Two processes on one GPU: what arrives has the digest of what was sent."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(_move, args=(port, str(tmp_path)), nprocs=2, join=True)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
