"""NCCL under managed groups: the versions and settings it needs, how it connects, how it fails, and how its communicators end.

What is written here follows torch's ``ProcessGroupNCCL`` (2.11 to 2.15; from 2.15 on the backend ``nccl`` of a script is another class, but
this one stays, and managed groups make it themselves) and NCCL's documentation. No GPU has run it so far.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.runtime.groups.backends import GenerationEnded, poll_interval
from holdfast.runtime.groups.device_library import Communicator

ABORTS: Final = (2, 28, 9)
"""From this version on NCCL's abort returns from every state; before, threads could hang in it (NVIDIA/nccl release notes 2.28.9)."""
SETTINGS: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        "0",
        "torch's watchdog would end this process, or abort its communicators one by one, when a peer is lost",
    ),
    "TORCH_NCCL_ENABLE_MONITORING": (
        "0",
        "torch would end this process when its watchdog waits for a long time, as it does during an abort",
    ),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "torch would write traces, and have all ranks write them, before a failed operation is reported"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "a wait for an operation would hold the training thread, and nothing could end it"),
    "TORCH_NCCL_DESYNC_DEBUG": ("0", "torch would switch its own error handling on again"),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", "the failure of this rank's GPU would end the process before its exception is reported"),
}
"""What torch reads when it makes a communicator: the value that managed groups need, and what would happen otherwise."""
SPEEDS: Final = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1"}
"""As above, where any value works: torch's watchdog sleeps four times as long after a failure, and no communicator is destroyed sooner."""
FROM_LAUNCHERS: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": ("1",)}
"""Values that torchrun, and Holdfast as it does, set for every rank: no user has chosen them."""
TORCHS_LIBRARY: Final = "libtorch_cuda.so"
"""The part of torch that is linked with NCCL."""
_FALSE: Final = frozenset({"0", "n", "no", "f", "false", "off"})
_CUDA_ERROR, _IN_PROGRESS = 1, 7
"""Two of NCCL's results: ``ncclUnhandledCudaError`` and ``ncclInProgress``; 0 is success."""


# -- whether it can be used -------------------------------------------------------------------------------------------------


def nccl_can_abort(version: tuple[int, ...]) -> bool:
    """Return whether an operation of this NCCL can be aborted in every state."""
    return version >= ABORTS


def version() -> tuple[int, ...] | None:
    """Return the version of NCCL that groups would use; None without a GPU."""
    return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() else None


def why_unusable(environment: Mapping[str, str] = os.environ) -> str:
    """Return why managed groups cannot use this process's NCCL; empty where they can, and where there is no GPU."""
    found = version()
    if found is None:
        return ""
    if not nccl_can_abort(found):
        old, needed = (".".join(map(str, one)) for one in (found, ABORTS))
        return f"NCCL {old} can hang when it is aborted (managed groups need NCCL {needed})"
    return why_not_with(environment)


def why_not_with(environment: Mapping[str, str]) -> str:
    """Return which setting of the user's in *environment* managed groups cannot work with; empty if there is none."""
    for name, (needed, otherwise) in SETTINGS.items():
        given = environment.get(name)
        if given is None or given.strip().lower() in _FALSE or given in FROM_LAUNCHERS.get(name, ()):
            continue
        return f"{name}={given}, with which {otherwise}: unset it, or set it to {needed}"
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL, with which torch would switch its own error handling on again: unset it, or set it to INFO"
    return ""


def set_up(environment: MutableMapping[str, str]) -> None:
    """Set in *environment* what torch reads when it makes the first communicator.

    Raises:
        RuntimeError: A setting of the user's contradicts it: `why_not_with`.
    """
    why = why_not_with(environment)
    if why:
        raise RuntimeError(f"managed groups cannot work with {why}")
    environment.update({name: value for name, (value, _) in SETTINGS.items()})
    for name, value in SPEEDS.items():
        environment.setdefault(name, value)


# -- the library ------------------------------------------------------------------------------------------------------------


class CommunicatorState:
    """Asks NCCL itself for the state of a communicator.

    torch's watchdog asks too, but keeps the first answer that is not success: with communicators whose calls return at once also "in
    progress" (``NCCLComm::checkForNcclError``, in torch 2.14.1 still). From then on it sees no error any more.
    """

    def __init__(self) -> None:
        # a look-up in torch's library finds the NCCL that torch uses, and no other that is installed
        nccl = ctypes.CDLL(TORCHS_LIBRARY, os.RTLD_NOLOAD | os.RTLD_NOW)
        self._ask, self._name = nccl.ncclCommGetAsyncError, nccl.ncclGetErrorString
        self._ask.argtypes, self._ask.restype = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)), ctypes.c_int
        self._name.argtypes, self._name.restype = (ctypes.c_int,), ctypes.c_char_p

    def failure(self, communicator: int) -> tuple[int, str]:
        """Return the result with which a *communicator* (its address) has failed, and NCCL's text for it; 0 if it has not."""
        state = ctypes.c_int(0)
        result = self._ask(communicator, ctypes.byref(state)) or state.value
        return (0, "") if result in {0, _IN_PROGRESS} else (result, self._name(result).decode())


def communicator_state() -> CommunicatorState | None:
    """Return what asks NCCL; None where torch's library, or NCCL in it, cannot be found: then torch's watchdog is what there is."""
    with suppress(OSError, AttributeError):
        return CommunicatorState()
    return None


class Nccl:
    """NCCL, as `device_library.DeviceLibrary` wants it."""

    name, tensors = "cuda", "cuda"

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._state: CommunicatorState | None = None
        self._communicators: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Their addresses, by the backend that has them."""

    def prepare(self) -> None:
        """Set torch's switches, and note this rank's GPU: a new thread would use the first one."""
        set_up(os.environ)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._state = communicator_state()

    def adopt_thread(self) -> None:
        """Choose this rank's GPU: a new thread would use the first one, and take memory there for a context."""
        torch.cuda.set_device(self._device)

    def connect(self, store: dist.Store, group: Communicator, is_cancelled: Callable[[], bool]) -> Any:  # noqa: ANN401 (a torch backend)
        """Return a backend that has carried an operation: whatever connects late has then connected, and not in the first step.

        The members meet in *store* before: within NCCL a rank that waits for a late one could not be called off.
        """
        self.adopt_thread()
        _meet(store, group, is_cancelled)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = group.timeout  # noqa: SLF001 (as torch's own new_group does)
        name: Any = group.name
        options.group_name, options.global_ranks_in_group = name, list(group.ranks)  # flight recorder and NCCL's logs show them
        # NCCL's calls return at once, and torch asks until they are done, for `TORCH_NCCL_NONBLOCKING_TIMEOUT` at most: without it a member
        # that is lost while NCCL connects would hold this thread for ever. See `_carry_one` for what it still holds.
        options.config.blocking = 0
        native = native_store(dist.PrefixStore("nccl", store), group.timeout, host=group.host, serving=group.rank == 0)
        backend = dist.ProcessGroupNCCL(native, group.rank, len(group.ranks), options)
        try:
            backend.eager_connect_single_device(self._device)
            self._carry_one(backend, is_cancelled)
        except BaseException:
            with suppress(RuntimeError):
                backend.abort()
            raise
        return backend

    def _carry_one(self, backend: Any, is_cancelled: Callable[[], bool]) -> None:  # noqa: ANN401 (as above)
        """Run an operation of one element, beside what the training thread runs.

        Its call waits until NCCL has connected, and holds the mutex that an abort needs; torch shows nobody whether NCCL has, and gives
        nobody the communicator, without that mutex. When this is cancelled meanwhile, this thread and its half of a communicator stay until
        NCCL fails, torch gives up (after 30 minutes, unless the user sets `TORCH_NCCL_NONBLOCKING_TIMEOUT`), or this process is replaced:
        `device_library.must_end_when_given_up`. torch's own limit is not set lower here, as it holds for every call: the first message to
        a rank that still compiles waits in one, and so does any operation while the queue of the device, which waits for a slow rank, is
        full.
        """
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            backend.allreduce([torch.ones(1, device=self._device)], dist.AllreduceOptions()).wait()
            arrived = self.record()
        self._communicators[backend] = int(backend._comm_ptr())  # noqa: SLF001 (torch's name): it is connected, so this does not wait
        while not arrived.query():
            if is_cancelled():
                raise GenerationEnded
            why = self.failure(backend)
            if why:
                raise dist.DistNetworkError(why)
            time.sleep(0.001)

    @contextmanager
    def grouped(self, backends: Sequence[Any]) -> Iterator[None]:
        """Put calls into one group of NCCL's, as torch's own ``_abort_process_group`` does for several communicators.

        Such a group counts for the thread that opens it. torch's ``abort`` hands the work to a thread of its own, so that the group alone
        would change nothing there: `abort_all` calls all aborts at the same time as well.
        """
        first, opened = backends[0], False
        with suppress(RuntimeError):  # an error of NCCL's is no reason not to abort
            first._group_start()  # noqa: SLF001 (torch's name)
            opened = True
        yield
        with suppress(RuntimeError):
            if opened:
                first._group_end()  # noqa: SLF001 (as above)

    def failure(self, backend: Any) -> str:  # noqa: ANN401 (as above)
        """Return what NCCL says of the communicator, or torch's watchdog, which knows of timeouts too: NCCL ends no operation by itself.

        *backend* has not been aborted: see `BackendGroup.failure`. Raise ``RuntimeError`` if NCCL's call of CUDA has failed. The watchdog
        does not tell that from a lost peer: there it raises at the next look at an event, as a `torch.AcceleratorError`.
        """
        communicator = self._communicators.get(backend, 0)
        if communicator and self._state is not None:
            result, text = self._state.failure(communicator)
            if result == _CUDA_ERROR:
                raise dist.DistBackendError(f"NCCL error: ncclUnhandledCudaError: {text}")
            if result:
                return f"NCCL reports for a communicator: {text}"
        ask = getattr(backend, "get_error", None)  # torch has it for NCCL only
        error = ask() if ask is not None else None
        name = getattr(error, "name", "SUCCESS")
        return "" if name == "SUCCESS" else f"NCCL reports {name} for a communicator"

    def queue(self) -> int:
        """Return the current stream."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def record(self) -> torch.cuda.Event:
        """Return an event in the current stream of this rank's GPU: a thread of the script's may never have chosen one."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_capturing(self) -> bool:
        """Ask for the current stream, which is that of the capture, or one that waits for it."""
        with torch.cuda.device(self._device):  # or the question would make a context on the first GPU, in such a thread
            return torch.cuda.is_current_stream_capturing()

    def empty(self) -> Tensor:
        """Return a tensor of one element on this rank's GPU."""
        return torch.zeros(1, device=self._device)


def _meet(store: dist.Store, group: Communicator, is_cancelled: Callable[[], bool]) -> None:
    """Wait in *store* until all members have come."""
    began, size = time.monotonic(), len(group.ranks)
    present = store.add("arrived", 1)
    while present < size:
        waited = time.monotonic() - began
        if is_cancelled():
            raise GenerationEnded
        if waited > group.arrival.total_seconds():
            raise dist.DistStoreError(
                f"timed out after {waited:.0f} s: {size - present} of the {size} members of group '{group.name}' have not come to connect"
            )
        time.sleep(poll_interval(waited))
        present = store.add("arrived", 0)


def native_store(store: dist.Store, timeout: timedelta, *, host: str, serving: bool) -> dist.Store:
    """Return a TCPStore that one member hosts and *store* announces: NCCL's threads use it without the Python interpreter."""
    if serving:
        made = dist.TCPStore("0.0.0.0", 0, is_master=True, timeout=timeout, wait_for_workers=False)  # noqa: S104 (other nodes must reach it)
        store.set("native_store", f"{host} {made.port}")
        return made
    address, port = store.get("native_store").decode().split()
    return dist.TCPStore(address, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
