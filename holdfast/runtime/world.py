"""The ranks of this job, as far as the runtime needs them: who am I, what do the others say."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist

from holdfast.runtime.groups import assembly
from holdfast.runtime.groups.council import Council

T = TypeVar("T")

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

    def gather(self, value: T) -> list[T]:
        """Return what every rank gave here, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        council = _council()
        if council is not None:
            found = council.gather(base64.b64encode(pickle.dumps(value)).decode())
            return [pickle.loads(base64.b64decode(one)) for one in found.values()]  # noqa: S301 (from ranks that know the job's token)
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return cast("list[T]", values)

    def told(self, value: T) -> T:
        """Return on every rank what rank 0 gave here."""
        if self.size == 1:
            return value
        if _council() is not None:
            return self.gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def _council() -> Council | None:
    """Return the ranks' own way to talk, where groups are managed: a loss of a peer ends it at once."""
    present = assembly.assembly()
    return None if present is None else present.council


def join(device: torch.device) -> bool:
    """Initialise the default group when the environment names several ranks and there is none; say whether it did."""
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1 or not dist.is_available() or dist.is_initialized():
        return False
    if device.type == "cuda":
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
