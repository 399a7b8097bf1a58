"""What the launcher does in a rank before its script begins, and what it finds in its environment: here, in a rank of a test.

PyTorch's tests give `init_process_group` a file over which the ranks find each other. The ranks of a job have the environment for that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from holdfast.host.ports import free_port
from holdfast.runtime.process.launcher import replace_init_process_group

TOKEN: Final = "cd" * 16
RENDEZVOUS: Final = ("init_method", "store", "rank", "world_size")


def enter_job() -> None:
    """Make this process a rank of a job whose groups are managed."""
    os.environ.update(HOLDFAST_GROUPS="managed", HOLDFAST_TOKEN=TOKEN, HOLDFAST_GENERATION="1")
    replace_init_process_group()
    dist.init_process_group = c10d.init_process_group = _FromFile(dist.init_process_group)  # type: ignore[assignment]
    logging.getLogger("holdfast.runtime").setLevel(logging.ERROR)  # what could not be repeated to another process is no concern here


class _FromFile:
    """Calls the launcher's function as a script in a job does."""

    def __init__(self, ours: Any) -> None:
        self._ours = ours

    def __call__(self, backend: Any = None, init_method: str | None = None, timeout: Any = None, **named: Any) -> None:
        """Create the default group over the ranks that the caller describes."""
        if backend == "gloo" and not dist.is_initialized():
            os.environ.update(_environment(init_method, named))
            init_method, named = None, {name: value for name, value in named.items() if name not in RENDEZVOUS}
        self._ours(backend, init_method, timeout, **named)


def _environment(init_method: str | None, named: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a rank of a job with these ranks; the first of them chooses the port."""
    store, rank, size = named.get("store"), int(named.get("rank", -1)), int(named.get("world_size", -1))
    if store is None:
        store, rank, size = next(dist.rendezvous(init_method or "env://", rank, size))
    if rank == 0:
        store.set("holdfast", str(free_port()))
    port = store.get("holdfast").decode()
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
