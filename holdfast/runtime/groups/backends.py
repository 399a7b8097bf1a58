"""The real groups under a managed one: built in a thread that can be left behind, and cut off from outside when a wait in them must end."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist

from holdfast.runtime.groups.kv_store import native_store
from holdfast.runtime.groups.waits import Waits, sleeps

T = TypeVar("T")

BUILD_SECONDS: Final = 30.0
"""How long peers may take in a recovery to come together for a group; a fault meanwhile is told by the flow and does not wait for this.

A group that is built for the first time has its own time-out for that: ranks come to it as their scripts do, which may load or compile.
"""
PATIENCE: Final = 0.002
"""Seconds between two looks at something that another rank is about to do."""
LONG_SECONDS: Final = 5.0
"""After so many seconds the looks become rare: the other rank loads or compiles, and a thousand that wait must not keep it from that."""
LOOK_SECONDS: Final = 0.02
"""Between two looks at whether a group that was cut has come to rest."""
PATIENCE_SECONDS: Final = 2.0
"""After this it is enough that its threads sleep: gloo never closes a connection with a message for an operation that has gone."""
FINAL_CHECKPOINT_SECONDS: Final = 1.0
"""How long the end of a group that is given back is waited for: an operation that hangs in it holds it up."""
WORKER: Final = "pt_gloo_runloop"
"""What torch calls the threads that carry out a gloo group's collectives."""
NCCL_ABORT: Final = (2, 28, 9)
"""From this version on NCCL's abort returns from every state: before it, threads could hang in it (NVIDIA/nccl release notes 2.28.9)."""


class GenerationEnded(Exception):
    """The flow has ended this generation while something waited in it."""


def nccl_can_abort(version: tuple[int, ...]) -> bool:
    """Tell whether an operation of this NCCL can be given up in every state."""
    return version >= NCCL_ABORT


@dataclass(slots=True)
class BackendGroup:
    """One built group: a backend for each kind of device, duplicates of its sockets, and the threads that carry out its collectives."""

    backends: dict[str, Any]
    sockets: list[socket.socket] = field(default_factory=list)
    workers: frozenset[int] = frozenset()
    waits: Waits = field(default_factory=Waits)
    _cut: threading.Lock = field(default_factory=threading.Lock)
    """Held from when it was cut for the first time."""

    def backend(self, device: str) -> Any:  # noqa: ANN401 (a gloo or an NCCL backend)
        """Return the backend for tensors on *device*."""
        try:
            return self.backends[device]
        except KeyError:
            raise RuntimeError(f"this group was made for {', '.join(self.backends)} and not for tensors on '{device}'") from None

    def abandon(self) -> None:
        """Have every wait in this group end now, with an error or as one that is over.

        Nothing in torch's interface does that for gloo; cutting its connections does for most, and `Waits` for the others.
        """
        self._disconnect()
        if self._cut.acquire(blocking=False):
            threading.Thread(target=self._see_to_the_end, name="holdfast-cut", daemon=True).start()

    def close(self) -> None:
        """Give the connections back; a group whose peers are gone would hang in its destructor if they were left open."""
        self._disconnect()
        backends, self.backends = self.backends, {}
        final_checkpoint = threading.Thread(target=backends.clear, name="holdfast-farewell", daemon=True)
        final_checkpoint.start()
        del backends
        if not self.waits.left:
            final_checkpoint.join(FINAL_CHECKPOINT_SECONDS)
        self.waits.end()
        for one in self.sockets:
            one.close()
        self.sockets.clear()

    def _disconnect(self) -> None:
        for one in list(self.sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if "cuda" in self.backends:
            self.backends["cuda"].abort()

    def _see_to_the_end(self) -> None:
        """End the waits that gloo has forgotten, as soon as nothing of it can write into a tensor any more."""
        patient, quiet = time.monotonic() + PATIENCE_SECONDS, 0
        while quiet < 2:  # noqa: PLR2004 (two looks with the same answer)
            time.sleep(LOOK_SECONDS)
            at_rest = time.monotonic() > patient or not _are_shared(self.sockets)
            quiet = quiet + 1 if at_rest and all(sleeps(one) for one in self.workers) and self.waits.are_asleep() else 0
        self.waits.end()


def pause_after(seconds: float) -> float:
    """Return how long to wait before the next look at what another rank is about to do, after waiting for so many *seconds*."""
    return PATIENCE if seconds < LONG_SECONDS else 0.1


def close_later(inners: Iterable[BackendGroup]) -> None:
    """Give connections back beside training: gloo takes some 10 ms to end a group, as its thread looks up only so often."""
    left = list(inners)

    def close() -> None:
        for one in left:
            one.close()

    if left:
        threading.Thread(target=close, name="holdfast-close", daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a group is built."""

    devices: tuple[str, ...]
    """Kinds of devices that it must serve."""
    timeout: timedelta
    """How long its operations wait."""
    host: str
    """This process's own address, as others reach it."""
    first: bool = False
    """It is built for the first time, not in a recovery: its members may take as long to come as its operations wait."""


def build(  # noqa: PLR0913 (who is where, how, and how to give it up)
    store: dist.Store, prefix: str, rank: int, size: int, *, way: BuildOptions, is_cancelled: Callable[[], bool]
) -> BackendGroup:
    """Build a group of *size* members over *store*, where all use the same *prefix*.

    Raise `GenerationEnded` as soon as *is_cancelled* says so: the thread that builds is left to its own time-out then.
    """
    return in_thread(lambda: _build(dist.PrefixStore(prefix, store), rank, size, way), is_cancelled)


def in_thread(make: Callable[[], T], is_cancelled: Callable[[], bool]) -> T:
    """Return what *make* makes in a thread of its own, or raise what it raises; raise `GenerationEnded` when *is_cancelled* says so first."""
    made: list[T] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001 (handed on to who waits)
            failed.append(error)
        done.set()

    threading.Thread(target=run, name="holdfast-build", daemon=True).start()
    while not done.wait(0.005):
        if is_cancelled():
            raise GenerationEnded
    if failed:
        raise failed[0]
    return made[0]


def _build(own: dist.Store, rank: int, size: int, way: BuildOptions) -> BackendGroup:
    backends: dict[str, Any] = {}
    before, threads = set(_sockets()), _workers()
    patience = way.timeout if way.first else timedelta(seconds=BUILD_SECONDS)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", own), rank, size, patience)
    gloo._set_default_timeout(way.timeout)  # noqa: SLF001 (torch's own way, without a public name)
    backends["cpu"] = gloo
    sockets = _ours(own, rank, size, before)
    if "cuda" in way.devices:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = way.timeout  # noqa: SLF001 (as torch's own new_group does)
        options.config.blocking = 0  # else a communicator in the making cannot be aborted
        # NCCL connects with the first operation, which is part of a step and of no recovery: it may have to wait for a compiler.
        store = native_store(dist.PrefixStore("nccl", own), way.timeout, host=way.host, serving=rank == 0)
        backends["cuda"] = dist.ProcessGroupNCCL(store, rank, size, options)
    return BackendGroup(backends, sockets, _workers() - threads)


def _workers() -> frozenset[int]:
    """Return the threads of this process that carry out collectives of gloo."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == WORKER:
                found.add(int(task.name))
    return frozenset(found)


def _are_shared(sockets: list[socket.socket]) -> bool:
    """Tell whether gloo still has one of the connections that these are duplicates of: it closes those whose end it has seen."""
    ours = set()
    for one in list(sockets):
        with suppress(OSError):  # it has been closed
            ours.add(os.fstat(one.fileno()).st_ino)
    seen = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names, not paths)
        with suppress(OSError):
            seen += os.fstat(int(name)).st_ino in ours
    return seen > len(ours)


def _sockets() -> dict[int, int]:
    """Return this process's sockets: inode to descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names, not paths)
        with suppress(OSError):
            facts = os.fstat(int(name))
            if stat.S_ISSOCK(facts.st_mode):
                found[facts.st_ino] = int(name)
    return found


def _ours(store: dist.Store, rank: int, size: int, before: set[int]) -> list[socket.socket]:
    """Return duplicates of the connections that the new gloo group made.

    Another thread may have opened sockets meanwhile, which must never be cut: a connection is the group's when one end of it
    is a port on which a member of the group listens for it. Every member tells its own.
    """
    fresh = [one for fd in (fd for inode, fd in _sockets().items() if inode not in before) if (one := _duplicate(fd)) is not None]
    listening = {_port(one.getsockname()) for one in fresh if _listens(one)}
    store.set(f"ports/{rank}", ",".join(str(port) for port in sorted(listening)))
    told = store.multi_get([f"ports/{peer}" for peer in range(size) if peer != rank]) if size > 1 else []
    theirs = {int(port) for ports in told for port in ports.decode().split(",") if port}
    found = []
    for one in fresh:
        if not _listens(one) and (_port(one.getsockname()) in listening or _remote_port(one) in theirs):
            found.append(one)
        else:
            one.close()
    return found


def _duplicate(fd: int) -> socket.socket | None:
    """Return a TCP socket that shares its connection with *fd*."""
    with suppress(OSError):  # it was closed meanwhile
        one = socket.socket(fileno=os.dup(fd))
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            return one
        one.close()
    return None


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(address: Any) -> int:  # noqa: ANN401 (as sockets give it)
    return int(address[1])


def _remote_port(one: socket.socket) -> int:
    with suppress(OSError):  # not connected, or no more
        return _port(one.getpeername())
    return 0
