"""The backend groups under a managed group: built in a thread that can be abandoned, and cut from outside when a wait in them must end.

gloo's part is here: its sockets, its threads, and its waits. What runs on a device comes from a `DeviceLibrary`.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist

from holdfast.runtime.groups.device_library import (
    Communicator,
    CommunicatorAborted,
    DeviceLibrary,
    abort_all,
    library,
    must_end_when_given_up,
)
from holdfast.runtime.groups.operations import Waits, is_asleep

log = logging.getLogger("holdfast.runtime")

T = TypeVar("T")

BUILD_SECONDS: Final = 30.0
"""How long peers may take in a recovery to join a group; a fault meanwhile is reported by the controller and does not wait for this.

A group that is built for the first time has its own timeout instead: ranks reach it as their scripts do, which may load or compile.
"""
POLL_SECONDS: Final = 0.002
"""Interval between two checks for something that another rank is about to do."""
SLOW_POLL_SECONDS: Final = 0.1
"""Interval after a wait of `FAST_POLL_SECONDS`: the other rank loads or compiles, and a thousand waiting ranks must not slow it down."""
FAST_POLL_SECONDS: Final = 5.0
QUIESCENCE_POLL_SECONDS: Final = 0.02
"""Interval between two checks whether a group that was cut has come to rest."""
OPEN_SOCKETS_SECONDS: Final = 2.0
"""After this it is enough that the group's threads sleep: gloo never closes a connection that holds a message for a vanished operation."""
FINISH_SECONDS: Final = 5.0
"""How long this rank waits for the other members of a group that it has done with: one that the script destroys, or that is replaced."""
CLOSE_SECONDS: Final = 1.0
"""How long `BackendGroup.close` waits for the destructor of a backend: an operation that hangs in it holds it up."""
GLOO_THREAD: Final = "pt_gloo_runloop"
"""torch's name for the threads that run a gloo group's collectives."""
HOST: Final = "cpu"
"""By this a group says that it carries tensors of the host: over gloo."""


class GenerationEnded(Exception):
    """The controller ended this generation while something waited in it."""


@dataclass(slots=True)
class BackendGroup:
    """One built group: its backends, and of gloo's duplicates of its sockets and the threads that run its collectives."""

    backends: dict[str, Any]
    """By `HOST` and the `DeviceLibrary.name` of the device's library."""
    library: DeviceLibrary | None = None
    """The library of one of the backends; None: all are gloo's."""
    sockets: list[socket.socket] = field(default_factory=list)
    threads: frozenset[int] = frozenset()
    waits: Waits = field(default_factory=Waits)
    _cut: threading.Lock = field(default_factory=threading.Lock)
    """Held once it has been cut."""
    _aborted: threading.Event | None = None
    """Set when the operations of the device have been aborted; None while nobody has begun to."""
    _calls: deque[None] = field(default_factory=deque)
    """One for each call into the device's library that is in progress.

    A call enters here and then looks whether an abort has begun; an abort begins and then looks here. So one of them sees the other, and
    no operation pays for a lock.
    """

    def backend(self, name: str) -> Any:  # noqa: ANN401 (a gloo or an NCCL backend)
        """Return the backend *name*: one of `backends`."""
        try:
            return self.backends[name]
        except KeyError:
            raise RuntimeError(f"this group was made for {', '.join(self.backends)} and not for tensors on '{name}'") from None

    def name_for(self, device: str) -> str:
        """Return the name of the backend for tensors on *device*."""
        return self.library.name if self.library is not None and device == self.library.tensors else device

    def runs_on_device(self, name: str) -> bool:
        """Return whether the operations of the backend *name* run on a device."""
        return self.library is not None and name == self.library.name

    @property
    def on_device(self) -> Any:  # noqa: ANN401 (as above)
        """The backend whose operations run on a device; None if it has none."""
        return None if self.library is None else self.backends.get(self.library.name)

    def failure(self) -> str:
        """Return how an operation of the device has failed; empty if none has, if the device runs none, and once they are aborted.

        It counts as a call: nobody may ask the library for a communicator that an abort takes away.
        """
        if self.library is None or self.on_device is None:
            return ""
        with suppress(CommunicatorAborted):
            return self.call(self.library.name, self.library.failure)
        return ""

    def abandon(self) -> None:
        """Make every wait in this group end now, with an error or as finished. Of several groups abandon all together: `abandon_all`.

        torch has no interface for that on gloo; shutting down its connections ends most waits, and `Waits` ends the others.
        """
        abandon_all([self])

    def cut(self) -> None:
        """End the waits for gloo."""
        self._disconnect()
        if self._cut.acquire(blocking=False):
            threading.Thread(target=self._end_waits_at_rest, name="holdfast-cut", daemon=True).start()

    def begin_abort(self, aborted: threading.Event) -> bool:
        """Take note that the operations of the device are aborted, and are when *aborted* is set; return False if they are already."""
        if self.on_device is None or self._aborted is not None:
            return False
        self._aborted = aborted
        return True

    def call(self, name: str, call: Callable[[Any], T]) -> T:
        """Return what *call* returns for the backend *name*, whose operations run on a device: an abort waits for that.

        Raise `CommunicatorAborted` if one has begun.
        """
        self._calls.append(None)
        try:
            if self._aborted is not None:
                raise CommunicatorAborted("the communicators of this group have been aborted")
            return call(self.backend(name))
        finally:
            self._calls.pop()

    def begin_call(self) -> None:
        """Take note of a call as `call` does, until `end_call`."""
        self._calls.append(None)
        if self._aborted is not None:
            self._calls.pop()
            raise CommunicatorAborted("the communicators of this group have been aborted")

    def end_call(self) -> None:
        """Take note of its end."""
        self._calls.pop()

    @property
    def is_called(self) -> bool:
        """Whether a call into the device's library is in progress."""
        return bool(self._calls)

    def finish(self) -> None:
        """Have the device's library end its connections together with the other members': they may still read from this rank's memory.

        Members that do not come within `FINISH_SECONDS` are not waited for: it aborts. torch's ``shutdown`` may hold what that needs; the
        connections then stay until it gives up, or this process ends. Nothing runs in this group any more, so nobody need be replaced.
        """
        backend, finished = self.on_device, threading.Event()

        def work() -> None:
            with suppress(RuntimeError):
                backend.shutdown()
                finished.set()

        if backend is None or self._aborted is not None:
            return
        ending = threading.Thread(target=work, name="holdfast-finish", daemon=True)
        ending.start()
        ending.join(FINISH_SECONDS)
        if finished.is_set():
            with _aborting:
                self.begin_abort(finished)
        else:
            abort_devices([self], give_up=_leave_open)

    def close(self) -> None:
        """Close the connections; a group whose peers have exited would hang in its destructor if they stayed open."""
        self._disconnect()
        if self.on_device is not None:
            abort_devices([self])
            assert self._aborted is not None
            self._aborted.wait()  # or the device may still write to tensors; it ends, or this process does, unless nothing runs: `finish`
        backends, self.backends = self.backends, {}
        destruction = threading.Thread(target=backends.clear, name="holdfast-destroy", daemon=True)
        destruction.start()
        del backends
        if not self.waits.abandoned:
            destruction.join(CLOSE_SECONDS)
        self.waits.end()
        for one in self.sockets:
            one.close()
        self.sockets.clear()

    def _disconnect(self) -> None:
        for one in list(self.sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _end_waits_at_rest(self) -> None:
        """End the waits that gloo forgot, as soon as none of its threads can write to a tensor any more."""
        deadline, quiet = time.monotonic() + OPEN_SOCKETS_SECONDS, 0
        while quiet < 2:  # noqa: PLR2004 (two checks with the same result)
            time.sleep(QUIESCENCE_POLL_SECONDS)
            at_rest = time.monotonic() > deadline or not _gloo_holds(self.sockets)
            quiet = quiet + 1 if at_rest and all(is_asleep(one) for one in self.threads) and self.waits.are_asleep() else 0
        self.waits.end()


def wait_briefly(is_done: Callable[[], bool]) -> None:
    """Wait until *is_done*, at most `FINISH_SECONDS`."""
    began = time.monotonic()
    while not is_done() and (waited := time.monotonic() - began) < FINISH_SECONDS:
        time.sleep(poll_interval(waited))


def poll_interval(seconds: float) -> float:
    """Return the pause before the next check for another rank's action, after waiting for so many *seconds*."""
    return POLL_SECONDS if seconds < FAST_POLL_SECONDS else SLOW_POLL_SECONDS


def abandon_all(inners: Iterable[BackendGroup]) -> None:
    """Make every wait in these groups end now: those for gloo at once, the operations of the device when all are aborted."""
    groups = list(inners)
    abort_devices(groups)
    for one in groups:
        one.cut()


_aborting: Final = threading.Lock()


def abort_devices(inners: Iterable[BackendGroup], give_up: Callable[[str], object] | None = None) -> None:
    """Begin to abort the operations of the device in these groups, together; those that are aborted already are left out.

    *give_up*: see `abort_all`.
    """
    aborted = threading.Event()
    with _aborting:
        groups = [one for one in inners if one.begin_abort(aborted)]
    if groups and groups[0].library is not None:
        called = [one.on_device for one in groups]
        abort_all(groups[0].library, called, aborted, is_called=lambda: any(one.is_called for one in groups), give_up=give_up)


def _leave_open(why: str) -> None:
    log.warning("%s: the connections of a group that is destroyed stay open", why)


def close_in_background(inners: Iterable[BackendGroup], may_close: Callable[[], bool] = lambda: True) -> None:
    """Close groups while training goes on: gloo takes some 10 ms to end a group, as its thread wakes up only so often.

    Wait until *may_close*, at most `FINISH_SECONDS`.
    """
    remaining = list(inners)

    def close() -> None:
        wait_briefly(may_close)
        abort_devices(remaining)
        for one in remaining:
            one.close()

    if remaining:
        threading.Thread(target=close, name="holdfast-close", daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a group is built."""

    devices: tuple[str, ...]
    """What carries its tensors: `HOST`, the name of the device's library, or both."""
    timeout: timedelta
    """Timeout of its operations."""
    host: str
    """This process's address, as other nodes reach it."""
    first: bool = False
    """It is built for the first time, not in a recovery: its members may take as long to join as its operations may wait."""
    name: str = ""
    """What the group is called, for the logs and traces of the device's library."""
    ranks: tuple[int, ...] = ()
    """The numbers of its members in the world, for the same; empty: from 0."""


def build(  # noqa: PLR0913 (who is where, how, and how to cancel it)
    store: dist.Store, prefix: str, rank: int, size: int, *, options: BuildOptions, is_cancelled: Callable[[], bool]
) -> BackendGroup:
    """Build a group of *size* members over *store*, where all use the same *prefix*.

    Raise `GenerationEnded` as soon as *is_cancelled* returns true: the building thread is then left to its own timeout, or to that of
    `must_end_when_given_up`.
    """
    return in_thread(lambda: _build(dist.PrefixStore(prefix, store), rank, size, options, is_cancelled), is_cancelled)


def in_thread(make: Callable[[], T], is_cancelled: Callable[[], bool]) -> T:
    """Return the result of *make*, run in its own thread, or raise its error; raise `GenerationEnded` when cancelled before."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(make())
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            result.set_exception(error)

    threading.Thread(target=run, name="holdfast-build", daemon=True).start()  # an executor would be joined at exit
    while not wait([result], 0.005).done:
        if is_cancelled():
            raise GenerationEnded
    return result.result()


def _build(own: dist.Store, rank: int, size: int, options: BuildOptions, is_cancelled: Callable[[], bool]) -> BackendGroup:
    arrival = options.timeout if options.first else timedelta(seconds=BUILD_SECONDS)
    built = BackendGroup({})
    if HOST in options.devices:
        before, threads = set(_sockets()), _gloo_threads()
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", own), rank, size, arrival)
        gloo._set_default_timeout(options.timeout)  # noqa: SLF001 (torch's own way, without a public name)
        built.backends[HOST] = gloo
        built.sockets, built.threads = _sockets_of_group(own, rank, size, before), _gloo_threads() - threads
    device = library()
    if device is not None and device.name in options.devices:
        ranks = options.ranks or tuple(range(size))
        group = Communicator(name=options.name, rank=rank, ranks=ranks, timeout=options.timeout, arrival=arrival, host=options.host)
        try:
            with must_end_when_given_up(options.name, is_cancelled):
                backend = device.connect(dist.PrefixStore("device", own), group, is_cancelled)
        except BaseException:
            built.close()
            raise
        built.library, built.backends[device.name] = device, backend
    return built


def _gloo_threads() -> frozenset[int]:
    """Return the threads of this process that run collectives of gloo, by kernel id."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has exited
            if (task / "comm").read_text().strip() == GLOO_THREAD:
                found.add(int(task.name))
    return frozenset(found)


# -- the sockets of a gloo group ------------------------------------------------------------------------------------------


def _sockets() -> list[tuple[int, int]]:
    """Return inode and descriptor of each open socket of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names, not paths)
        with suppress(OSError):
            facts = os.fstat(int(name))
            if stat.S_ISSOCK(facts.st_mode):
                found.append((facts.st_ino, int(name)))
    return found


def _gloo_holds(sockets: list[socket.socket]) -> bool:
    """Return whether gloo still has one of the connections that these are duplicates of: it closes those whose end it has noticed."""
    ours = set()
    for one in list(sockets):
        with suppress(OSError):  # it has been closed
            ours.add(os.fstat(one.fileno()).st_ino)
    return sum(inode in ours for inode, _ in _sockets()) > len(ours)


def _sockets_of_group(store: dist.Store, rank: int, size: int, before: set[tuple[int, int]]) -> list[socket.socket]:
    """Return duplicates of the connections that the new gloo group made.

    Another thread may have opened sockets meanwhile, which must never be cut: a connection belongs to the group when one end of it is a
    port on which a member listens for the group. Every member publishes its ports in *store*.
    """
    inodes = {inode for inode, _ in before}
    fresh = [one for inode, fd in dict(_sockets()).items() if inode not in inodes and (one := _duplicate(fd)) is not None]
    listening = {int(one.getsockname()[1]) for one in fresh if _listens(one)}
    store.set(f"ports/{rank}", ",".join(str(port) for port in sorted(listening)))
    published = store.multi_get([f"ports/{peer}" for peer in range(size) if peer != rank]) if size > 1 else []
    theirs = {int(port) for ports in published for port in ports.decode().split(",") if port}
    found = []
    for one in fresh:
        if not _listens(one) and (int(one.getsockname()[1]) in listening or _remote_port(one) in theirs):
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


def _remote_port(one: socket.socket) -> int:
    with suppress(OSError):  # not connected, or not any more
        return int(one.getpeername()[1])
    return 0
