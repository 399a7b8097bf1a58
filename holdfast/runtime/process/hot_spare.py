"""A hot spare's way from the script's first line to a rank: warm up in every role, offload its state, be activated."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups.membership import install, installed
from holdfast.runtime.process import launcher, restart_script, successor
from holdfast.runtime.process.restart_script import RestartScript
from holdfast.runtime.state.tensors import local_of
from holdfast.runtime.state.training import Training

_WARMED: Final = "HOLDFAST_WARMED"
_POPULATE_WRITE: Final = 23
"""``MADV_POPULATE_WRITE`` of madvise(2), from Linux 5.14 on."""


class Roles:
    """The roles that a hot spare is to know, those that it has warmed up in, and the current one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        rank = int(environment["RANK"])
        self.roles: list[list[int]] = json.loads(environment.get("HOLDFAST_ROLES") or "[]") or [[rank]]
        self.waiting_role = int(environment.get("HOLDFAST_WAITING_ROLE") or 0) % len(self.roles)
        """The role in which it waits, after the warm-up in all others."""
        self.now = next((number for number, ranks in enumerate(self.roles) if rank in ranks), self.waiting_role)
        self.warmed: list[int] = json.loads(environment.get(_WARMED) or "[]")

    def start_with_other_roles(self) -> None:
        """Before anything is built: begin with the roles in which this hot spare will not wait."""
        if self.now == self.waiting_role:
            self.run_next_role(done=False)

    def run_next_role(self, *, done: bool) -> None:
        """Run the script again for the next role, if there is one; *done*: the current one is warmed up."""
        warmed = [*self.warmed, self.now] if done else self.warmed
        others = [number for number in range(len(self.roles)) if number not in (self.waiting_role, self.now, *self.warmed)]
        following = others[0] if others else self.waiting_role
        if following != self.now:
            raise RestartScript({"RANK": str(min(self.roles[following])), _WARMED: json.dumps(warmed)})


class OffloadedState:
    """Parameters and optimizer state whose memory has been released; the objects stay, and with them all that was compiled for them."""

    def __init__(self, training: Training) -> None:
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        tensors: list[Tensor] = list(training.model.parameters())
        for parameter in tensors:
            parameter.grad = None
        states = [state for optimizer in training.optimizers for state in optimizer.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
        seen: set[int] = set()
        for tensor in tensors:
            storage = local_of(tensor).untyped_storage()
            if storage._cdata not in seen and storage.resizable():  # noqa: SLF001 (torch's own identity of a storage)
                seen.add(storage._cdata)  # noqa: SLF001
                self._storages.append((storage, storage.nbytes()))
        for storage, _ in self._storages:
            storage.resize_(0)
        _release_memory()

    def reallocate(self) -> None:
        """Allocate the memory again; its content comes from another rank. Pages are made in the background, during the rendezvous."""
        for storage, size in self._storages:
            storage.resize_(size)
        spans = [(storage.data_ptr(), size) for storage, size in self._storages if storage.device.type == "cpu"]
        threading.Thread(target=_make_pages, args=(spans, self._storages), name="holdfast-pages", daemon=True).start()


def _make_pages(spans: Iterable[tuple[int, int]], _alive: object) -> None:
    """Have the kernel make the pages of *spans* (address and bytes) now, not at the first write; one that cannot leaves them."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = os.sysconf("SC_PAGE_SIZE")
    for begin, size in spans:
        first, end = -(-begin // page) * page, (begin + size) // page * page
        if end > first and madvise(first, end - first, _POPULATE_WRITE):
            return


def _release_memory() -> None:
    """Return freed memory to the system, and not only to the allocator."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def since_start() -> float:
    """Return the seconds since this process was started."""
    return time.time() - float(os.environ.get("HOLDFAST_STARTED") or time.time())


def coverage_of(dry_run: Any) -> dict[str, int]:  # noqa: ANN401 (a DryRun)
    """Return how many operations the warm-up had, and how many of them were answered from a recording."""
    return {"calls": dry_run.calls, "played": dry_run.played}


def activate(command: Message) -> None:
    """Take on the environment and the log of the rank that *command* gives to this hot spare."""
    os.environ.update({str(name): str(value) for name, value in command.get("environment", {}).items()})
    for name in ("HOLDFAST_HOT_SPARE", "HOLDFAST_ROLES", "HOLDFAST_WAITING_ROLE", _WARMED):
        os.environ.pop(name, None)
    launcher.name_process(sys.argv[:1])
    path = command.get("log")
    if path:
        with suppress(OSError):  # training matters more than its log
            log = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            for target in (1, 2):
                os.dup2(log, target)
            os.close(log)


# -- running the script again -------------------------------------------------------------------------------------------


def leave_to_successor(environment: Mapping[str, str]) -> NoReturn:
    """Have the successor run the script as the rank of *environment*, as libraries in this process may know another; exit."""
    present = installed()
    restart_script.begin()
    if present is not None:
        present.forward_to(restart_script.store)
    os.environ.update(environment)
    pid = successor.ready()
    leave = None if pid is None else link().register_successor(pid)
    if leave is None or not leave.ok:
        why = "it has no successor process" if leave is None else leave.why
        raise SystemExit(f"this hot spare cannot become rank {environment['RANK']}: {why}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    successor.go(os.environ, restart_script.take_stored())
    os._exit(0)


def start_over(environment: Mapping[str, str]) -> None:
    """Make the process as it was before its script ran, except for what has been imported, compiled and cached."""
    present = installed()
    restart_script.begin()
    if present is not None:
        present.forward_to(restart_script.store)
    if dist.is_initialized():
        dist.destroy_process_group()
    if present is not None:
        present.close()
    install(None)
    os.environ.update(environment)
    _forget_meshes()
    gc.collect()


def _forget_meshes() -> None:
    """Clear torch's caches for the meshes of the run that is over.

    They hold the results of DTensor operations by the ranks of a mesh and not by this process's place in it: the next run would be given
    tensors of a mesh in which it is another rank, and load that one's shards.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415 (torch's own way, without a public name)

    _clear_sharding_prop_cache()
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.distributed.")]
    caches = [value for module in modules for value in vars(module).values()] + gc.get_objects()  # other threads have their own caches
    for one in caches:
        if type(one) is functools._lru_cache_wrapper and str(one.__module__).startswith("torch.distributed."):  # noqa: SLF001
            one.cache_clear()
