"""Collectives that run on a device: what a managed group needs of their library, how it waits for a device, and how it ends operations.

An operation of such a library returns before it has run: it only lies in a queue of the device. So its end, and its failure, show later, in
an event of the device and in what the library says of its communicator. And one operation can hold up all others on the device, also those
of groups that have lost nobody: whoever ends one communicator must end all.

`nccl.Nccl` is the library of NVIDIA's GPUs. The tests implement the same interface without a GPU (`tests/runtime/device_stand_in.py`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.runtime.agent_client import link
from holdfast.runtime.snapshots.device_runtime import CapturedStep
from holdfast.runtime.telemetry.wait_windows import process_waits

log = logging.getLogger("holdfast.runtime")

ABORT_SECONDS: Final = 10.0
"""How long all communicators of this process may take to abort. After that they never will, and the process must be replaced."""
CALL_SECONDS: Final = 0.5
"""How long an abort waits for calls into the library that are in progress.

They return at once as a rule, and then nothing is aborted under them. But one may wait for operations that only the abort ends: that of a
device whose queue is full.
"""
ABORT_STATUS: Final = 75
"""Exit status of a process whose communicators cannot be aborted (EX_TEMPFAIL: another attempt may succeed)."""
GIVEN_UP_SECONDS: Final = 300.0
"""How long a library may go on connecting a group that this process has given up; then the process must be replaced.

Only the library itself can end that, as when it notices the end of a member, or the process's end. Meanwhile training goes on.
"""
GIVEN_UP_POLL_SECONDS: Final = 0.05
"""Interval between two looks whether a group that is being connected has been given up."""
CALL_POLL_SECONDS: Final = 0.001
"""Interval between two looks whether calls into the library are in progress."""
FAST_POLL_SECONDS: Final = 0.0001
"""Interval between two looks at an event of the device, at first: a step must not wait noticeably longer than its device works."""
SLOW_POLL_SECONDS: Final = 0.0005
FAST_SECONDS: Final = 0.02
FAILURE_POLL_SECONDS: Final = 0.01
"""Interval between two questions to the communicators whether they have failed."""


class DeviceEvent(Protocol):
    """A place in a queue of the device."""

    def query(self) -> bool:
        """Return whether the device has come there. Raise ``RuntimeError`` when the device has failed."""

    def elapsed_time(self, end: Any) -> float:  # noqa: ANN401 (an event of the same library)
        """Return the milliseconds of the device's time from this event to *end*; the device has passed both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """What is to be connected: the members of one group."""

    name: str
    """The group's name, for the library's logs and traces."""
    rank: int
    """This process's index in the group."""
    ranks: tuple[int, ...]
    """The members' numbers in the world."""
    timeout: timedelta
    """Timeout of its operations."""
    arrival: timedelta
    """How long the members may take to come."""
    host: str
    """This process's address, as other nodes reach it."""


class DeviceLibrary(Protocol):
    """A library whose operations run on a device."""

    name: str
    """By this a group says that it needs it (see `backends.BuildOptions.devices`)."""
    tensors: str
    """torch's name for the device whose tensors it carries."""

    def prepare(self) -> None:
        """Make this process ready for its first communicator, in the thread that trains. The device has been chosen."""

    def adopt_thread(self) -> None:
        """Have the calling thread use this rank's device, and no other: it is about to ask for events or operations."""

    def connect(self, store: dist.Store, group: Communicator, is_cancelled: Callable[[], bool]) -> Any:  # noqa: ANN401 (a backend)
        """Return a torch backend whose connections exist, in a thread of its own; raise ``RuntimeError`` when that fails."""

    def grouped(self, backends: Sequence[Any]) -> AbstractContextManager[None]:
        """Have the library take all calls on *backends* within the context, from this thread, as one."""

    def failure(self, backend: Any) -> str:  # noqa: ANN401 (as above)
        """Return how an operation of *backend* has failed, without the library's having ended it; empty if none has."""

    def queue(self) -> int:
        """Return what identifies the queue to which the calling thread adds its work now."""

    def record(self) -> DeviceEvent:
        """Return an event at the end of that queue."""

    def is_capturing(self) -> bool:
        """Return whether what the calling thread starts now is recorded into a graph of the device, and does not run."""

    def empty(self) -> Tensor:
        """Return a tensor of one element on the device."""


_library: list[DeviceLibrary | None] = []


def library() -> DeviceLibrary | None:
    """Return the library of this process's device; None without one: all operations run on the CPU."""
    if not _library:
        from holdfast.runtime.groups.nccl import Nccl  # noqa: PLC0415 (it builds on this module)

        _library.append(Nccl() if torch.cuda.is_available() else None)
    return _library[0]


def use(one: DeviceLibrary) -> None:
    """Have *one* carry the operations of all groups that are made from now on, in place of the device's own library."""
    _library[:] = [one]


def refuse_capture(what: str, replays: str) -> None:
    """Raise `CapturedStep` if the calling thread captures a graph, into which *what* would go; *replays*: what its replays would do.

    A graph runs no Python when it is replayed, and keeps the communicators that it was captured with.
    """
    device = library()
    if device is not None and device.is_capturing():
        raise CapturedStep(what, replays)


# -- the end of operations ------------------------------------------------------------------------------------------------


class CommunicatorAborted(dist.DistNetworkError):
    """The communicators of a group are being aborted, or have been: nobody may call them."""


class AbortTimedOut(RuntimeError):
    """The communicators of this process do not abort: nothing can end its operations but its own end.

    No loss of a peer: an abort waits for this process's own device and driver alone.
    """


def abort_all(
    lib: DeviceLibrary,
    backends: Sequence[Any],
    done: threading.Event,
    *,
    is_called: Callable[[], bool],
    give_up: Callable[[str], object] | None = None,
) -> None:
    """Abort all *backends* together, in other threads, and set *done* when all have ended.

    An abort waits for the device, on which an operation of another communicator may wait for ever. So all are aborted at the same time:
    within one group of the library, and each from a thread of its own, because a backend's ``abort`` blocks until its own is done.

    It begins when no call into them is in progress (*is_called*), or after `CALL_SECONDS`. torch asks in such a call for the state of its
    communicator until that is ready; of one that has been aborted it gets none, and asks on. When a call or an abort has not ended after
    `ABORT_SECONDS`, *give_up* is called, by default `replace_process`: the training thread may wait in the library, or in the driver.
    """

    def work() -> None:
        begun = time.monotonic()
        while is_called() and time.monotonic() < begun + CALL_SECONDS:
            time.sleep(CALL_POLL_SECONDS)
        with lib.grouped(backends):
            threads = [threading.Thread(target=_abort, args=(one,), name="holdfast-abort-one", daemon=True) for one in backends]
            for one in threads:
                one.start()
            for one in threads:
                one.join(max(0.0, begun + ABORT_SECONDS - time.monotonic()))
        while is_called() and time.monotonic() < begun + ABORT_SECONDS:
            time.sleep(CALL_POLL_SECONDS)
        stuck = sum(one.is_alive() for one in threads)
        if stuck:
            (give_up or replace_process)(f"{stuck} of {len(threads)} communicators of this rank did not abort within {ABORT_SECONDS:.0f} s")
        elif is_called():
            (give_up or replace_process)(f"a call into the device's library did not return within {ABORT_SECONDS:.0f} s of an abort")
        done.set()

    threading.Thread(target=work, name="holdfast-abort", daemon=True).start()


def _abort(backend: Any) -> None:  # noqa: ANN401 (a backend of the library)
    try:
        backend.abort()
    except RuntimeError as error:  # it has ended, in whatever way: it will not be used again
        log.info("a communicator reported while it was aborted: %s", error)


@contextmanager
def must_end_when_given_up(group: str, is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Replace this process when the block, in which a library connects *group*, goes on for `GIVEN_UP_SECONDS` after *is_cancelled*.

    The thread in the block holds what an abort of the half communicator needs. It must not stay for as long as the library likes, with the
    communicator's memory on the device.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(GIVEN_UP_POLL_SECONDS) and not is_cancelled():
            pass
        if not ended.wait(GIVEN_UP_SECONDS):
            replace_process(f"the communicator of group '{group}' was given up {GIVEN_UP_SECONDS:.0f} s ago, and still connects")

    threading.Thread(target=watch, name="holdfast-connecting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def replace_process(why: str) -> None:
    """End this process at once, as the agent sees: another takes its rank. No exit handler runs, as it could wait for the device too."""
    error = AbortTimedOut(f"{why}: this process exits, so that another takes its rank")
    log.error("%s", error)
    link().exception(error)
    sys.stderr.flush()
    os._exit(ABORT_STATUS)


# -- waiting for the device -------------------------------------------------------------------------------------------------


def wait_for(is_done: Callable[[], bool], must_end: Callable[[], str], end: Callable[[str], object]) -> None:
    """Wait until the device has come so far that *is_done*.

    Meanwhile ask *must_end* why operations must end; when it gives a reason, *end* them, once, and wait on, for what the device still
    computes. What *is_done* raises is raised: a device that has failed says so there.
    """
    if is_done():
        return
    began = asked = time.perf_counter()
    window, ended = process_waits(), False
    ours = window.enter("device")
    try:
        while not is_done():
            now = time.perf_counter()
            if not ended and now - asked >= FAILURE_POLL_SECONDS:
                asked = now
                why = must_end()
                if why:
                    ended = True
                    end(why)
            time.sleep(FAST_POLL_SECONDS if now - began < FAST_SECONDS else SLOW_POLL_SECONDS)
    finally:
        if ours:
            window.leave()
