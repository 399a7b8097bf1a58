"""`holdfast.join`: called in place of `torch.distributed.init_process_group`, it creates groups that survive the loss of a rank."""

from __future__ import annotations

import logging
import os
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from holdfast.runtime import world
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups import first_exchanges
from holdfast.runtime.groups.backends import NCCL_ABORT, nccl_can_abort
from holdfast.runtime.groups.dry_run import DryRun
from holdfast.runtime.groups.membership import GroupGeneration, MembershipManager, devices, install
from holdfast.runtime.groups.process_group import BACKEND
from holdfast.runtime.process import restart_script, successor
from holdfast.runtime.process.hot_spare import Roles
from holdfast.runtime.telemetry import ddp_determinism
from holdfast.runtime.telemetry.rank_status import answer_queries

_log: Final = logging.getLogger("holdfast.runtime")


def join() -> None:
    """Create the default process group as a managed group: one that survives the loss of a rank.

    Call it in place of ``torch.distributed.init_process_group()``. All groups that are created later, by any code, are managed too: those
    of DDP, FSDP2 and a ``DeviceMesh``. Under ``torchrun``, or with an NCCL that can hang when it is aborted, it creates PyTorch's own
    groups. With one rank it creates none.

    Raises:
        RuntimeError: The default process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("holdfast.join() replaces torch.distributed.init_process_group(), which has been called already")
    environment = os.environ
    if int(environment.get("WORLD_SIZE") or 1) <= 1:
        return
    if environment.get("HOLDFAST_HOT_SPARE"):
        successor.record_imports()
        Roles(environment).start_with_other_roles()
    token = environment.get("HOLDFAST_TOKEN", "")
    device = world.device_of(environment, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not link().attached or not token or not _can_be_managed():
        world.join(device)
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    _init_managed(MembershipManager(GroupGeneration.from_env(environment), token, int(environment.get("LOCAL_WORLD_SIZE") or 1), devices()))


def _can_be_managed() -> bool:
    """Return whether groups here can be aborted in the middle of an operation; log on rank 0 why not."""
    version = _nccl()
    if version is None or nccl_can_abort(version):
        return True
    if os.environ.get("RANK") == "0":
        _log.warning(
            "NCCL %s can hang when it is aborted: the groups are torch's own, and after a fault all ranks are restarted. "
            "Managed groups need NCCL %s (the PyTorch that Holdfast is installed with brings it)",
            ".".join(map(str, version)),
            ".".join(map(str, NCCL_ABORT)),
        )
    return False


def _nccl() -> tuple[int, ...] | None:
    """Return the version of NCCL that groups would use; None without a GPU."""
    return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() else None


def _init_managed(manager: MembershipManager) -> None:
    """Have torch create its groups through *manager*, and create the default group."""
    install(manager)
    ddp_determinism.watch()
    joins_later = os.environ.get("HOLDFAST_HOT_SPARE") or os.environ.get("HOLDFAST_FRESH")
    if joins_later:
        manager.dry_run = dry_run = DryRun.from_env(manager.groups)
        first_exchanges.watch()
        if dry_run.hot_spare is None:
            dry_run.record = manager.find_record
    else:
        manager.record()
    link().listen(answer_queries(manager.receive))
    restart_script.forward_to(manager.receive)
    if not joins_later:
        manager.begin()
    kv_store = manager.generation_store
    store = kv_store.prefixed("torch", default_pg_timeout) if kv_store is not None else dist.HashStore()
    dist.init_process_group(BACKEND, store=store, rank=manager.generation.rank, world_size=manager.generation.world)
