"""The ranks of this job, as far as the runtime needs them: who am I, what do the others say."""

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

from holdfast.runtime.groups import membership
from holdfast.runtime.groups.control_tree import ControlTree

STORE_SECONDS: Final = 60.0
"""How long a rank looks for the store before it leaves the waiting to torch."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's *rank* among *size* ranks; one process without a group is a world of its own."""

    rank: int
    size: int
    backend: str

    @classmethod
    def present(cls) -> World:
        """Return the world as it is now."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), dist.get_backend())
        return cls(0, 1, "none")

    @property
    def grouped(self) -> bool:
        """Whether there is a process group to speak through."""
        return self.backend != "none"

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 (anything JSON holds)
        """Return what every rank gave here, in the order of ranks, on every rank, as JSON hands it on: a tuple comes as a list.

        JSON and not torch's own collectives of objects: those unpickle what comes over the network, which may be any code.
        """
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        control_tree = _control_tree()
        if control_tree is not None:
            return list(control_tree.gather(value).values())
        return [json.loads(told) for told in _gathered(json.dumps(value).encode(), self.size)]

    def told(self, value: Any) -> Any:  # noqa: ANN401 (as above)
        """Return on every rank what rank 0 gave here."""
        if self.size == 1 or _control_tree() is not None:
            return self.gather(value if self.rank == 0 else None)[0]
        return json.loads(_broadcast(json.dumps(value).encode() if self.rank == 0 else b""))


def _gathered(own: bytes, size: int) -> list[bytes]:
    """Return the bytes of every rank, over the default group."""
    sizes = [_count(0) for _ in range(size)]
    dist.all_gather(sizes, _count(len(own)))
    lengths = [int(one) for one in sizes]
    rows = [_row(b"", max(lengths)) for _ in lengths]
    dist.all_gather(rows, _row(own, max(lengths)))
    return [_bytes(row)[:length] for row, length in zip(rows, lengths, strict=True)]


def _broadcast(own: bytes) -> bytes:
    """Return the bytes of rank 0, over the default group."""
    length = _count(len(own))
    dist.broadcast(length, src=0)
    row = _row(own, int(length))
    dist.broadcast(row, src=0)
    return _bytes(row)


def _device() -> torch.device:
    """Return where the default group takes tensors from: the processor where it can, else the current device."""
    return torch.device(c10d._get_object_coll_device())  # noqa: SLF001 (torch has no public way to ask)


def _count(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64, device=_device())


def _row(data: bytes, length: int) -> Tensor:
    """Return *data* in a row of *length* bytes; every rank's must be as long."""
    return torch.frombuffer(bytearray(data.ljust(max(1, length), b"\0")), dtype=torch.uint8).to(_device())


def _bytes(row: Tensor) -> bytes:
    return bytes(row.cpu().numpy().tobytes())


def _control_tree() -> ControlTree | None:
    """Return the ranks' own way to talk, where groups are managed: a loss of a peer ends it at once."""
    present = membership.membership()
    return None if present is None else present.control_tree


def device_of(environment: Mapping[str, str], gpus: int) -> torch.device:
    """Return the device of the rank in *environment*, on a machine of whose GPUs it sees so many: that of its place on the node.

    A launcher that shows each process one GPU gives them all the same number. Where the environment names no place it is whatever the
    script has chosen. Raise ``RuntimeError`` when there are more ranks than GPUs: two would share one.
    """
    place = environment.get("LOCAL_RANK") or ""
    if not gpus or not place:
        return torch.device("cuda" if gpus else "cpu")
    if gpus == 1:
        return torch.device("cuda", 0)
    if int(place) >= gpus:
        raise RuntimeError(
            f"LOCAL_RANK is {place}, and this process sees {gpus} GPUs: start at most {gpus} ranks on this node, or show it more "
            "(CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", int(place))


def join(device: torch.device) -> bool:
    """Initialise the default group when the environment names several ranks and there is none; say whether it did."""
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1 or not dist.is_available() or dist.is_initialized():
        return False
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # object collectives over NCCL go through the current device
    _await_store()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return True


def _await_store() -> None:
    """Wait until rank 0 listens, looking often.

    torch waits half a second before it tries again: a rank that is some milliseconds earlier than rank 0 would pay it at
    every restart. What else may be wrong with the address is torch's to say, when it tries itself.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    deadline = time.monotonic() + STORE_SECONDS
    while host and port.isdigit() and os.environ.get("RANK") != "0" and time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        time.sleep(0.003)
