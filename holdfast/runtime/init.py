"""`holdfast.join`: what a script calls in place of `torch.distributed.init_process_group`, so that its groups can be mended."""

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
from holdfast.runtime.process.standby import Roles
from holdfast.runtime.telemetry import ddp_determinism
from holdfast.runtime.telemetry.rank_status import answering

_log: Final = logging.getLogger("holdfast.runtime")


def join() -> None:
    """Join the other ranks, in groups that live through the loss of a rank.

    Every group that is made after this call, by whatever code, can be mended: DDP's, FSDP2's, those of a `DeviceMesh`. Without an
    agent of Holdfast (a run under ``torchrun``), and with an NCCL that may hang when it is aborted, the groups are torch's own; with one
    rank there are none.
    """
    if dist.is_initialized():
        raise RuntimeError("holdfast.join() comes in place of torch.distributed.init_process_group(), and that has been called already")
    environment = os.environ
    if int(environment.get("WORLD_SIZE") or 1) <= 1:
        return
    if environment.get("HOLDFAST_STANDBY"):
        successor.record_imports()
        Roles(environment).start_with_other_roles()
    token = environment.get("HOLDFAST_TOKEN", "")
    device = world.device_of(environment, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not link().attached or not token or not _can_be_managed():
        world.join(device)
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    _assemble(MembershipManager(GroupGeneration.from_env(environment), token, int(environment.get("LOCAL_WORLD_SIZE") or 1), devices()))


def _can_be_managed() -> bool:
    """Tell whether groups here can be given up in the middle of an operation; say on rank 0 why not."""
    version = _nccl()
    if version is None or nccl_can_abort(version):
        return True
    if os.environ.get("RANK") == "0":
        _log.warning(
            "NCCL %s can hang when it is aborted: the groups are torch's own, and after a fault all ranks start again. "
            "Managed groups need NCCL %s (the PyTorch that Holdfast is installed with brings it)",
            ".".join(map(str, version)),
            ".".join(map(str, NCCL_ABORT)),
        )
    return False


def _nccl() -> tuple[int, ...] | None:
    """Return the version of NCCL that groups would use; none without a GPU."""
    return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() else None


def _assemble(made: MembershipManager) -> None:
    """Have torch make its groups through *made*, and make the first."""
    install(made)
    ddp_determinism.watch()
    comes_later = os.environ.get("HOLDFAST_STANDBY") or os.environ.get("HOLDFAST_FRESH")
    if comes_later:
        made.dry_run = dry_run = DryRun.from_env(made.groups)
        first_exchanges.watch()
        if dry_run.standby is None:
            dry_run.record = made.find_record
    else:
        made.record()
    link().listen(answering(made.receive))
    restart_script.forward_to(made.receive)
    if not comes_later:
        made.begin()
    store = made.generation_store.prefixed("torch", default_pg_timeout) if made.generation_store is not None else dist.HashStore()
    dist.init_process_group(BACKEND, store=store, rank=made.generation.rank, world_size=made.generation.world)
