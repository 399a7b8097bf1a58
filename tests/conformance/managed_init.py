"""`init_process_group` as the launcher replaces it: what a script asks of gloo becomes a managed group."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from holdfast.ports import free_port
from holdfast.runtime.groups.membership import GroupGeneration, MembershipManager, devices, install
from holdfast.runtime.groups.process_group import BACKEND

TOKEN: Final = "cd" * 16
MANAGED: Final = (None, "gloo", "cpu:gloo", BACKEND)
"""Backends in whose place a managed group is made."""

_stock_init: Final = dist.init_process_group


def replace_init() -> None:
    """Have `init_process_group` make managed groups in this process and those that it forks."""
    dist.init_process_group = c10d.init_process_group = _managed_init
    logging.getLogger("holdfast.runtime").setLevel(logging.ERROR)  # what cannot be replayed to a replaced rank is no concern here


def _managed_init(  # noqa: PLR0913, PLR0917 (torch's signature)
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: dist.Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    **more: Any,
) -> None:
    """Make the default group a managed one; the ranks find each other as the caller wants it."""
    if backend not in MANAGED or dist.is_initialized():
        _stock_init(backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id, **more)
        return
    if store is None:
        store, rank, world_size = next(dist.rendezvous(init_method or "env://", rank, world_size))
    store.set_timeout(timeout or default_pg_timeout)
    if rank == 0:
        store.set("holdfast", str(free_port()))
    port = int(store.get("holdfast"))
    generation = GroupGeneration(
        number=1,
        rank=rank,
        world=world_size,
        incarnations=dict.fromkeys(range(world_size), 1),
        store=("127.0.0.1", port),
        serve=0,
    )
    manager = MembershipManager(generation, TOKEN, world_size, devices())
    install(manager)
    manager.record()
    manager.begin()
    assert manager.generation_store is not None
    own = manager.generation_store.prefixed("torch", timeout or default_pg_timeout)
    _stock_init(BACKEND, None, timeout, world_size, rank, own, group_name, pg_options, device_id, **more)
