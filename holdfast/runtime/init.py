"""How the default process group is created: by `holdfast.join`, or by torch's `init_process_group`, which the launcher replaces."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from holdfast.runtime import world
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups import nccl, torch_interface
from holdfast.runtime.groups.device_library import library
from holdfast.runtime.groups.dry_runs import first_exchanges
from holdfast.runtime.groups.dry_runs.dry_run import DryRun
from holdfast.runtime.groups.membership import GroupGeneration, MembershipManager, devices, devices_of, install, installed
from holdfast.runtime.groups.script_scan import uses_session
from holdfast.runtime.process import restart_script, successor
from holdfast.runtime.process.exit import make_failure_certain
from holdfast.runtime.process.hot_spare import Roles
from holdfast.runtime.process.launcher import original
from holdfast.runtime.telemetry import ddp_determinism, integration_level
from holdfast.runtime.telemetry.rank_status import answer_queries


class GroupsNotManaged(RuntimeError):
    """The job demands managed groups (``groups: managed``), and the groups that the script asks for cannot be managed."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"the job says `groups: managed`, but {self.why}. Change that in the script, or use `groups: auto`"


def join() -> None:
    """Create the default process group as a managed group: one that survives the loss of a rank.

    Call it in place of ``torch.distributed.init_process_group()``. All groups that are created later, by any code, are managed too: those
    of DDP, FSDP2 and a ``DeviceMesh``. Under ``torchrun``, with ``groups: stock``, or with an NCCL that can hang when it is aborted or
    whose settings contradict it, it creates PyTorch's own groups. With one rank it creates none.

    Raises:
        RuntimeError: The default process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("holdfast.join() replaces torch.distributed.init_process_group(), which has been called already")
    environment = os.environ
    if int(environment.get("WORLD_SIZE") or 1) <= 1:
        return
    device = world.device_of(environment, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    why = _why_never()
    if why:
        _end_hot_spare(why)
        integration_level.groups_are_stock(why)
        world.join(device)
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    _start_hot_spare()
    backend = "gloo" if library() is None else "cpu:gloo,cuda:nccl"
    _init_managed(_manager(devices()), original(dist.init_process_group), {"backend": backend})


def init_process_group(real: Callable[..., None], *given: Any, **named: Any) -> None:  # noqa: ANN401 (torch's own)
    """Create the default group for a script that calls `torch.distributed.init_process_group`, whose own function is *real*.

    It is managed where the job's ``groups`` want that and the arguments allow it, else torch's own.

    Raises:
        GroupsNotManaged: The job demands managed groups, and the arguments do not allow it.
        Exception: What torch raises for wrong arguments, and at a second call.
    """
    try:
        arguments: dict[str, Any] = dict(inspect.signature(real).bind(*given, **named).arguments)
    except TypeError:
        real(*given, **named)  # it has the message
        raise
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE") or 1) <= 1 or not _are_valid(arguments):
        real(*given, **named)
        return
    why = _why_stock(arguments)
    if why:
        integration_level.groups_are_stock(why)
        real(*given, **named)
        return
    manager = installed()
    if manager is not None:
        _init_again(manager, real, arguments)
        return
    served = devices_of(_backend_of(arguments))
    if torch.cuda.is_available() and "cuda" in served:
        device = world.device_of(os.environ, torch.cuda.device_count())
        if device.index is not None:
            torch.cuda.set_device(device)
    _start_hot_spare()
    _init_managed(_manager(served, replaces_init=True), real, arguments)
    integration_level.groups_are_managed()


# -- whether groups are managed -------------------------------------------------------------------------------------------


def _why_stock(arguments: Mapping[str, Any]) -> str:
    """Return why the group that *arguments* describe is torch's own; empty where it is managed. Raise where the job demands that."""
    demanded, why = os.environ.get("HOLDFAST_GROUPS") == "managed", _why_never() or _why_not_with(arguments)
    if why and demanded:
        raise GroupsNotManaged(why)
    why = why or ("" if demanded else _why_not_by_default())
    if why:
        _end_hot_spare(why)
    return why


def _end_hot_spare(why: str) -> None:
    """Exit, in a hot spare: it cannot take a rank in groups that are torch's own."""
    if os.environ.get("HOLDFAST_HOT_SPARE"):
        raise SystemExit(f"a hot spare cannot take a rank: {why}")


def _are_valid(arguments: Mapping[str, Any]) -> bool:
    """Return whether torch would accept *arguments*, as far as they matter here; its own function has the error messages."""
    device = arguments.get("device_id")
    if device is not None and not torch.accelerator.is_available():
        return False
    return isinstance(arguments.get("timeout") or default_pg_timeout, timedelta) and not ({"store", "init_method"} <= arguments.keys())


def _backend_of(arguments: Mapping[str, Any]) -> str:
    """Return the backend that the script asks for, in torch's words."""
    return str(arguments.get("backend") or "undefined").lower()


def _why_never() -> str:
    """Return why no group can be managed in this process; empty where they can."""
    environment = os.environ
    if not link().attached or not environment.get("HOLDFAST_TOKEN"):
        return "no agent of Holdfast started this process"
    if environment.get("HOLDFAST_GROUPS") == "stock":
        return integration_level.STOCK
    lacking = torch_interface.missing()
    if lacking:
        return f"torch {torch.__version__} has no {lacking}, which managed groups need"
    return nccl.why_unusable(environment)


def _why_not_with(arguments: Mapping[str, Any]) -> str:
    """Return why the group that *arguments* describe cannot be managed; empty where it can."""
    environment, backend = os.environ, _backend_of(arguments)
    given = {name: value for name, value in arguments.items() if value is not None}
    ours = {"rank": environment["RANK"], "world_size": environment["WORLD_SIZE"]}
    other = next((name for name, value in ours.items() if given.get(name, -1) not in (-1, int(value))), None)
    reasons = {
        "a `store` of the script's own, over which Holdfast cannot connect ranks anew": "store" in given,
        f"init_method='{given.get('init_method')}', and managed groups connect by the environment": "init_method" in given
        and given["init_method"] != "env://",
        f"{other}={given.get(other or '')}, and the environment says {ours.get(other or '')}": other is not None,
        f"backend '{backend}', which cannot be managed: gloo and nccl can": not devices_of(backend),
        "backend 'nccl' without a GPU": "nccl" in backend and library() is None,
        "`pg_options`, which a repaired group would not have": "pg_options" in given and "nccl" in backend,
        "`_ranks`": bool(given.get("_ranks")),
        "`enable_reconfigure`, by which the script repairs its groups itself": bool(given.get("enable_reconfigure")),
    }
    return next((f"init_process_group() is given {what}" for what, applies in reasons.items() if applies), "")


def _why_not_by_default() -> str:
    """Return why groups are not managed under ``groups: auto``, though they could be; empty where they are.

    All ranks must come to the same answer.
    """
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    package = spec.parent if spec is not None else ""
    if not file or not uses_session(Path(file).resolve(), package, sys.argv[1:]):
        return integration_level.NO_SESSION
    if torch.cuda.is_available():
        return "managed groups are not proven on GPUs yet (`groups: managed` uses them)"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL checks PyTorch's own groups only"
    return ""


# -- creating them ------------------------------------------------------------------------------------------------------


def _start_hot_spare() -> None:
    """In a hot spare, begin with the roles in which it will not wait."""
    if os.environ.get("HOLDFAST_HOT_SPARE"):
        successor.record_imports()
        Roles(os.environ).start_with_other_roles()


def _manager(served: tuple[str, ...], *, replaces_init: bool = False) -> MembershipManager:
    """Return the manager of the groups of this process, which serve these kinds of devices."""
    environment = os.environ
    generation, stride = GroupGeneration.from_env(environment), int(environment.get("LOCAL_WORLD_SIZE") or 1)
    manager = MembershipManager(generation, environment["HOLDFAST_TOKEN"], stride, served)
    manager.replaces_init = replaces_init
    return manager


def _init_managed(manager: MembershipManager, real: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Have torch create its groups through *manager*, and create the default group by torch's *real* function."""
    device = library()
    if device is not None and device.name in manager.devices:
        device.prepare()
    make_failure_certain()
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
        manager.begin(arguments.get("timeout") or default_pg_timeout)
    _create_default(manager, real, arguments, "torch")


def _init_again(manager: MembershipManager, real: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Create groups for a script that has destroyed those it had. A replaced rank could not catch up with that: they are not repaired."""
    manager.decline("the script destroyed its process groups and created others")
    manager.reopened += 1
    _create_default(manager, real, arguments, f"torch-{manager.reopened}")


def _create_default(manager: MembershipManager, real: Callable[..., None], arguments: Mapping[str, Any], prefix: str) -> None:
    kv_store, generation = manager.generation_store, manager.generation
    store = kv_store.prefixed(prefix, default_pg_timeout) if kv_store is not None else dist.HashStore()
    own = {"store": store, "rank": generation.rank, "world_size": generation.world, "init_method": None}
    real(**{**arguments, **own})
