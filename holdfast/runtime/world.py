"""The ranks of this job as the runtime needs them: this process's rank and device, and exchanging values with the other ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from holdfast.runtime.groups.control_tree import ControlTree
from holdfast.runtime.groups.membership import membership

STORE_SECONDS: Final = 60.0
"""How long a rank tries to reach the store before it leaves the waiting to torch."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's *rank* among *size* ranks; a process without a group is a world of its own."""

    rank: int
    size: int
    backend: str

    @classmethod
    def current(cls) -> World:
        """Return the world as it is now."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), dist.get_backend())
        return cls(0, 1, "none")

    @property
    def grouped(self) -> bool:
        """Whether there is a process group."""
        return self.backend != "none"

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 (anything JSON holds)
        """Return the values of all ranks, in the order of ranks, on every rank. They go through JSON: a tuple arrives as a list.

        JSON and not torch's collectives of objects: those unpickle what arrives over the network, which may be any code.
        """
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        control_tree = _control_tree()
        if control_tree is not None:
            return list(control_tree.gather(value).values())
        own = json.dumps(value).encode()
        sizes = [_count(0) for _ in range(self.size)]
        dist.all_gather(sizes, _count(len(own)))
        lengths = [int(one) for one in sizes]
        rows = [_row(b"", max(lengths)) for _ in lengths]
        dist.all_gather(rows, _row(own, max(lengths)))
        return [json.loads(_bytes(row)[:length]) for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:  # noqa: ANN401 (as above)
        """Return rank 0's *value* on every rank."""
        if self.size == 1 or _control_tree() is not None:
            return self.gather(value if self.rank == 0 else None)[0]
        own = json.dumps(value).encode() if self.rank == 0 else b""
        length = _count(len(own))
        dist.broadcast(length, src=0)
        row = _row(own, int(length))
        dist.broadcast(row, src=0)
        return json.loads(_bytes(row))


def _device() -> torch.device:
    """Return the device from which the default group takes tensors: the CPU where it can, else the current device."""
    return torch.device(c10d._get_object_coll_device())  # noqa: SLF001 (torch has no public way to ask)


def _count(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64, device=_device())


def _row(data: bytes, length: int) -> Tensor:
    """Return *data* padded to *length* bytes; every rank's must have the same length."""
    return torch.frombuffer(bytearray(data.ljust(max(1, length), b"\0")), dtype=torch.uint8).to(_device())


def _bytes(row: Tensor) -> bytes:
    return bytes(row.cpu().numpy().tobytes())


def _control_tree() -> ControlTree | None:
    """Return the ranks' control tree where groups are managed: the loss of a peer ends its operations at once."""
    manager = membership()
    return None if manager is None else manager.control_tree


def device_of(environment: Mapping[str, str], gpus: int) -> torch.device:
    """Return the device of the rank in *environment* in a process that sees this many *gpus*: the one with its local rank.

    A launcher that shows each process one GPU gives them all the same number. Without a local rank it is what the script has chosen.
    Raise ``RuntimeError`` when there are more ranks than GPUs: two would share one.
    """
    local_rank = environment.get("LOCAL_RANK") or ""
    if not gpus or not local_rank:
        return torch.device("cuda" if gpus else "cpu")
    if gpus == 1:
        return torch.device("cuda", 0)
    if int(local_rank) >= gpus:
        raise RuntimeError(
            f"LOCAL_RANK is {local_rank}, and this process sees {gpus} GPUs: start at most {gpus} ranks on this node, or show it more "
            "(CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", int(local_rank))


def join(device: torch.device) -> bool:
    """Initialise the default group when the environment has several ranks and there is none; return whether it did."""
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1 or not dist.is_available() or dist.is_initialized():
        return False
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # object collectives over NCCL use the current device
    _await_store()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return True


def _await_store() -> None:
    """Wait until rank 0 listens, with frequent attempts.

    torch waits half a second between attempts: a rank that is milliseconds earlier than rank 0 would lose that at every restart.
    Anything else that is wrong with the address is reported by torch when it connects.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    deadline = time.monotonic() + STORE_SECONDS
    while host and port.isdigit() and os.environ.get("RANK") != "0" and time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        time.sleep(0.003)
