# mypy: disable-error-code="override,attr-defined,arg-type,assignment,call-arg,no-any-return"
# torch's stubs give these methods overloads that no Python subclass can repeat, and omit half of their options.
"""`ManagedGroup`: a process group for torch's own code, over a backend group that can be replaced.

It is a Python subclass of `torch.distributed.ProcessGroup`, registered as backend ``holdfast``, so whatever makes groups (DDP, FSDP2,
`DeviceMesh`, pipelining, functional collectives) makes these. A lost peer does not raise: the loss is recorded, the operation returns a
neutral result, later ones in this group do nothing, and the commit vote at the end of the step rejects the step.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FunctionType
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from holdfast.runtime.groups import device_library
from holdfast.runtime.groups.backends import FINISH_SECONDS, HOST, BackendGroup
from holdfast.runtime.groups.device_library import CommunicatorAborted
from holdfast.runtime.groups.operations import InFlightOperations, OperationMark, StepTransaction, fill_neutral_result, skip_compilation
from holdfast.runtime.peer_errors import is_device_error, is_peer_loss
from holdfast.runtime.snapshots.device_runtime import USE_ENDED_COMMUNICATORS
from holdfast.runtime.telemetry.device_times import process_device_times
from holdfast.runtime.telemetry.wait_windows import kind_of, process_waits

BACKEND: Final = "holdfast"
"""The name under which torch knows these groups."""


class PeerLostOutsideStep(dist.DistNetworkError):
    """A peer was lost outside of a step: the result of the operation is lost, and the operation is not retried."""

    def __init__(self, group: str, why: str) -> None:
        super().__init__(f"a rank was lost outside of a step, in group '{group}': {why}. This cannot be retried, so all ranks restart")


class Answerer(Protocol):
    """Answers operations when there are no peers, as `DryRun` does."""

    def answer(self, group: ManagedGroup, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> int:
        """Fill *outputs* with what peers would have sent; return the source rank of a receive from any source."""


class OperationListener(Protocol):
    """Observes the operations of a group, for example to record them."""

    def started(self, group: ManagedGroup, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> Callable[..., None] | None:
        """Take note of an operation; return a callback for its success, if wanted. It is given the source of a receive from any source."""


class Call(NamedTuple):
    """An operation: its name, its outputs and inputs, and where it is noted that it has started."""

    name: str
    outputs: list[Tensor]
    inputs: list[Tensor]
    mark: OperationMark


def _future_value(name: str, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return what gloo's future of an operation gives: the tensors that a rank passed, and each rank's part of a gathered one."""
    if name == "all_gather_single" and outputs[0].is_contiguous():
        ranks = outputs[0].numel() // max(1, inputs[0].numel())
        return list(outputs[0].view(-1).chunk(max(1, ranks)))
    return outputs or inputs if name in {"broadcast", "reduce"} else outputs


class _Work(dist.Work):
    """What all our work objects have in common: they end well whatever happens, as a lost peer is no exception."""

    def __init__(self, outputs: list[Tensor], source: int = 0) -> None:
        super().__init__()
        self._outputs, self._source = outputs, source

    def is_success(self) -> bool:
        """Return True: it ended without an exception."""
        return True

    def exception(self) -> Any:  # noqa: ANN401 (torch's signature)
        """Return None: there never is one."""
        return None

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the sender, for a receive from any source."""
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def synchronize(self) -> None:
        """Wait as `wait` does."""
        self.wait()


class DoneWork(_Work):
    """An operation that finished when it started: in a broken group, or in a dry run."""

    def __init__(self, name: str, outputs: list[Tensor], inputs: list[Tensor], source: int = 0) -> None:
        super().__init__(outputs, source)
        self._name, self._inputs = name, inputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 (torch's signature)
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a fulfilled future; who waits for it on a GPU waits for what the caller has put into its queue."""
        on_gpu = {one.device for one in self._outputs if one.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(on_gpu))
        future.set_result(_future_value(self._name, self._outputs, self._inputs))
        return future

    def is_completed(self) -> bool:
        """Return True: it has finished."""
        return True


class ManagedWork(_Work):
    """An operation in progress."""

    def __init__(self, group: ManagedGroup, inner: BackendGroup, work: Any, call: Call, ended: Callable[..., None] | None) -> None:  # noqa: ANN401
        super().__init__(call.outputs)
        self._group, self._inner, self._work, self._call, self._ended = group, inner, work, call, ended

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; a lost peer is recorded, not raised."""
        window = process_waits()
        ours = window.enter(kind_of(self._call.name))
        try:
            ended = self._inner.waits.wait(self._call.name, self._work, timeout)
        except RuntimeError as error:
            self._group.peer_failed(self._inner, error)
            ended = False
        finally:
            self._group.in_flight.leave(self._call.mark)
            if ours:
                window.leave()
        if not ended:
            self._group.fill_neutral_result(*self._call[:3])
        elif self._ended is not None:
            callback, self._ended = self._ended, None
            callback(self.source_rank()) if self._call.name == "recv<any" else callback()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs that is always fulfilled."""
        theirs = self._work.get_future()  # gloo has none for messages and a reduce-scatter, and says so
        process_waits().operation_started()
        return self._inner.waits.promise(theirs, self._settle, self._abandon)

    def _settle(self, future: torch.futures.Future[Any]) -> list[Tensor]:
        process_waits().operation_ended()
        self._group.in_flight.leave(self._call.mark)
        try:
            value: list[Tensor] = future.value()
        except RuntimeError as error:
            self._group.peer_failed_in_thread(self._inner, error)
            return self._neutral_value()
        if self._ended is not None:
            self._ended()
        return value

    def _abandon(self) -> list[Tensor]:
        process_waits().operation_ended()
        self._group.in_flight.leave(self._call.mark)
        return self._neutral_value()

    def _neutral_value(self) -> list[Tensor]:
        self._group.fill_neutral_result(*self._call[:3])
        return _future_value(*self._call[:3])

    def is_completed(self) -> bool:
        """Return whether it has finished."""
        return self._inner.waits.over or bool(self._work.is_completed())

    def source_rank(self) -> int:
        """Return the sender, for a receive from any source."""
        return int(self._work._source_rank())  # noqa: SLF001 (torch's name for it)


class _Batch(NamedTuple):
    """Operations that a device runs as one: a single one, or those that the library starts when the last has been given to it."""

    inner: BackendGroup
    calls: list[Call]
    ended: list[Callable[..., None]]
    """Called when their results may be used."""
    reached: device_library.DeviceEvent
    """Where the device comes to them."""


class DeviceWork(_Work):
    """An operation, or several that started as one, in the queue of a device.

    A wait for it only holds up the device's queue, and a future of it is fulfilled at once: the values come when the device has run it.
    What fails later shows when the host waits for the device, before the step counts.
    """

    def __init__(self, group: ManagedGroup, work: Any, batch: _Batch) -> None:  # noqa: ANN401 (the library's)
        super().__init__([one for call in batch.calls for one in call.outputs])
        self._group, self._work = group, work
        self._inner, self._calls, self._ended, reached = batch
        group.in_flight.follow([call.mark for call in batch.calls], reached.query, work.is_completed)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Have the device's queue wait for it; a lost peer is recorded, not raised. A barrier or a *timeout* holds up the host as well."""
        # A work of NCCL's that `is_completed` has found failed aborts its communicator in `wait`, and only that one. NCCL then says so here
        # too, unless another thread finds it at this very moment. torch's wait with a timeout would do the same when the time is over.
        why = self._group.device_failure()
        if why:
            self._group.abandon(why)
            self._fill_neutral_results()
            return True
        try:
            with process_device_times().waiting():
                self._work.wait()
            if timeout:
                self._wait_on_host(timeout)
            elif self._calls[0].name == "barrier":
                self._group.wait_for_device(self._work.is_completed)
        except RuntimeError as error:
            self._group.peer_failed(self._inner, error)
            self._fill_neutral_results()
            return True
        ended, self._ended = self._ended, []
        for callback in ended:
            callback(self.source_rank()) if self._calls[0].name == "recv<any" else callback()
        return True

    def _wait_on_host(self, timeout: timedelta) -> None:
        """Wait until the device has run it; raise ``RuntimeError`` after *timeout*, as torch's own wait does."""
        end = time.monotonic() + timeout.total_seconds()
        self._group.wait_for_device(lambda: self._work.is_completed() or time.monotonic() > end)
        if not self._work.is_completed():
            name, seconds = self._calls[0].name, timeout.total_seconds()
            raise dist.DistBackendError(f"NCCL timeout in `{name}` of group '{self._group.group_name}': it has not run after {seconds:g} s")

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs that is always fulfilled."""
        theirs = self._work.get_future()
        process_waits().operation_started()
        process_device_times().last_wait_begins()
        return theirs.then(self._settle)

    def _settle(self, future: torch.futures.Future[Any]) -> list[Tensor]:
        process_waits().operation_ended()
        try:
            value: list[Tensor] = future.value()
        except RuntimeError as error:
            self._group.peer_failed_in_thread(self._inner, error)
            self._fill_neutral_results()
            return _future_value(*self._calls[0][:3])
        for callback in self._ended:
            callback()
        return value

    def _fill_neutral_results(self) -> None:
        for call in self._calls:
            self._group.fill_neutral_result(*call[:3])

    def is_completed(self) -> bool:
        """Return whether the device has run it."""
        return bool(self._work.is_completed())

    def source_rank(self) -> int:
        """Return the sender, for a receive from any source."""
        return int(self._work._source_rank())  # noqa: SLF001 (torch's name for it)


class ManagedGroup(dist.ProcessGroup):
    """A group of ranks. Its members stay the same, the processes behind them may change."""

    def __init__(self, name: str, ranks: list[int], me: int, transaction: StepTransaction, timeout: timedelta) -> None:
        super().__init__(ranks.index(me), len(ranks))
        self.name_in_torch, self.ranks, self.me = name, ranks, me
        self.all_ranks = ranks
        """Its ranks when no place is vacant."""
        self.transaction, self.timeout = transaction, timeout
        self.operations = 0
        """Operations started on the current connections: members that disagree about it cannot keep them."""
        self.in_flight = InFlightOperations()
        """Progress of this rank in the group."""
        self.used = False
        """Whether any operation ever went through it: an unused group need not be rebuilt at once."""
        self.built: dict[int, int] = {}
        """The members' incarnations when the current connections were made."""
        self.dry_run: Answerer | None = None
        self.listener: OperationListener | None = None
        self.on_shutdown: Callable[[ManagedGroup], object] | None = None
        """Called when the script destroys the group."""
        self.edition = 1
        """How many groups of this name this process has made: a script may destroy a group and make it again."""
        self.devices: tuple[str, ...] = (HOST,)
        """What carries its tensors: see `BuildOptions.devices`."""
        self.on_device_failure: Callable[[str], object] | None = None
        """Called when the waits for the device must end; it ends those in all groups, as operations of a device hold up each other."""
        self._batches: dict[int, _Batch | None] = {}
        """By thread: the operations that it starts as one; None: none of them reach the library."""
        self._description = ""
        self._inner: BackendGroup | None = None
        self._ready = threading.Event()

    # -- the backend group underneath ---------------------------------------------------------------------------------

    def replace_backend(self, inner: BackendGroup | None, incarnations: dict[int, int]) -> BackendGroup | None:
        """Put *inner* under this group (None: it will follow) and return the previous one."""
        before, self._inner = self._inner, inner
        self.in_flight.forget()
        self.operations, self.built = 0, {rank: incarnations.get(rank, 0) for rank in self.ranks}
        if inner is None:
            self._ready.clear()
        else:
            self._ready.set()
        return before

    @property
    def inner(self) -> BackendGroup | None:
        """The current backend group."""
        return self._inner

    @property
    def is_broken(self) -> bool:
        """Whether an operation failed in it since it was built."""
        return self.group_name in self.transaction.broken

    def abandon(self, why: str) -> None:
        """End every wait in this group now; where a device runs its operations, in all groups."""
        inner = self._inner
        if inner is not None and inner.on_device is not None and self.on_device_failure is not None:
            self.on_device_failure(why)
            return
        self.mark_broken(why)
        if inner is not None:
            inner.abandon()

    def mark_broken(self, why: str) -> None:
        """Have operations return neutral results from now on: its waits are about to end."""
        self.transaction.fail(why, self.group_name)
        self._ready.set()

    def wait_for_device(self, is_done: Callable[[], bool]) -> None:
        """Wait until the device has come so far that *is_done*; when a peer is lost meanwhile, its operations end."""
        device_library.wait_for(is_done, lambda: self.transaction.why if self.transaction.lost else self.device_failure(), self.abandon)

    def device_failure(self) -> str:
        """Return what the library says of failed operations in this group; empty while none has failed, and while nobody has seen it."""
        inner = self._inner
        return "" if inner is None else inner.failure()

    def peer_failed(self, inner: BackendGroup, error: RuntimeError) -> None:
        """Record *error* if it reports a lost peer, or follows from one; raise it if it comes from the script or its GPU."""
        if is_device_error(error):
            raise error
        if inner is not self._inner:
            return  # these connections have been replaced
        if not is_peer_loss(error) and not self.transaction.lost:
            raise error
        self.abandon(str(error))  # gloo does not pass errors on: the next rank in the ring would wait until its timeout
        if self.transaction.final:
            raise PeerLostOutsideStep(self.group_name, self.transaction.why) from error

    def peer_failed_in_thread(self, inner: BackendGroup, error: RuntimeError) -> None:
        """Record *error* as `peer_failed` does, in a thread where nobody could catch what it raises: the vote raises that."""
        try:
            self.peer_failed(inner, error)
        except RuntimeError as real:
            self.transaction.fail(f"{type(real).__name__}: {real}", self.group_name)

    def fill_neutral_result(self, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Fill *outputs* with harmless values: the step does not count, and a script that checks its numbers must not fail over it.

        Outside of a step nothing is retried, so nothing may replace the real result: there it raises.
        """
        if self.transaction.final:
            raise PeerLostOutsideStep(self.group_name, self.transaction.why)
        self.transaction.damaged += 1
        fill_neutral_result(name, self.rank(), outputs, inputs)

    def become(self, name: str, ranks: list[int], me: int) -> None:
        """Become the group *name* of *ranks*: a hot spare built it for another rank of the same role."""
        if len(ranks) != len(self.all_ranks):
            raise ValueError(f"group '{self.group_name}' has {len(self.all_ranks)} members and cannot become '{name}' with {len(ranks)}")
        c10d._unregister_process_group(self.name_in_torch)  # noqa: SLF001 (torch has no other way to rename a group)
        self.name_in_torch, self.ranks, self.me, self.all_ranks = name, ranks, me, ranks
        world = c10d._world  # noqa: SLF001
        world.pg_names[self] = c10d.GroupName(name) if hasattr(c10d, "GroupName") else name
        world.pg_group_ranks[self] = {rank: place for place, rank in enumerate(ranks)}
        c10d._register_process_group(name, self)  # noqa: SLF001

    def members_in(self, present: Sequence[int]) -> list[int]:
        """Return those of its ranks that are *present* in the world."""
        return [rank for rank in self.all_ranks if rank in present]

    def set_members(self, present: Sequence[int]) -> None:
        """Keep those of its ranks as members that are *present* in the world; the other places are vacant.

        torch numbers the ranks of the world without gaps: it knows each by its index among those present.
        """
        numbers = {rank: number for number, rank in enumerate(present)}
        self.ranks = self.members_in(present)
        table = {numbers[rank]: place for place, rank in enumerate(self.ranks)}
        c10d._world.pg_group_ranks[self] = table  # noqa: SLF001

    # -- the interface that torch uses ----------------------------------------------------------------------------------

    def name(self) -> str:
        """Return the name under which torch knows these groups; for ``gloo``, DDP's logger would ask for the interfaces of gloo's own."""
        return BACKEND

    getBackendName = name  # noqa: N815 (torch's name)

    def rank(self) -> int:
        """Return this process's index in the group."""
        return self.ranks.index(self.me)

    getRank = rank  # noqa: N815 (torch's name)

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    getSize = size  # noqa: N815 (torch's name)

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name that all members use for this group."""
        return self.name_in_torch

    group_name = property(getGroupName)

    def _set_group_name(self, name: str) -> None:
        self.name_in_torch = name

    setGroupName = _set_group_name  # noqa: N815 (torch's name)

    def getGroupDesc(self) -> str:  # noqa: N802 (torch's name)
        """Return what the script calls this group, for torch's logs."""
        return self._description or f"{BACKEND}:{self.name_in_torch}"

    group_desc = property(getGroupDesc)

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    setGroupDesc = _set_group_desc  # noqa: N815 (torch's name)

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ANN401 (torch's own)
        inner = self._inner
        return self if inner is None else inner.backend(inner.name_for(device.type))

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the kinds of devices it serves: `torch.distributed.checkpoint.async_save` asks for a CPU."""
        known = device_library.library()
        kinds = [known.tensors if known is not None and one == known.name else one for one in self.devices]
        return [torch.device(one) for one in dict.fromkeys(kinds)]

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations take at most *timeout*."""
        self.timeout = timeout
        if self._inner is not None:
            for backend in self._inner.backends.values():
                backend._set_default_timeout(timeout)  # noqa: SLF001 (torch's own way)

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that the current connections have carried."""
        inner = self._inner
        return 0 if inner is None else int(next(iter(inner.backends.values()))._get_sequence_number_for_group())  # noqa: SLF001 (torch's name)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: gloo and NCCL count from the creation of the connections."""

    def shutdown(self) -> None:
        """Close the connections, and have no recovery rebuild them: the script destroys the group.

        A script that does so while it handles an exception, as in a ``finally``, waits briefly for its operations: those of others may wait
        for ones that it will never start. Nobody knows of the exception before it has left the script.
        """
        if self._inner is not None and not self.is_broken:
            late = time.monotonic() + FINISH_SECONDS if sys.exc_info()[0] is not None else float("inf")
            # the script may still want their results; a lost peer ends those of all groups
            self.wait_for_device(lambda: self.in_flight.settle() or time.monotonic() > late)
            if time.monotonic() > late and not self.in_flight.settle():
                self.abandon("the script destroys it after an exception, with operations under way")
        if self.on_shutdown is not None:
            self.on_shutdown(self)
        if self._inner is not None:
            if not self.is_broken:
                self._inner.finish()
            self._inner.close()
            self._inner = None

    def abort(self) -> None:
        """End every wait."""
        self.abandon("the script aborted the group")

    # -- operations ---------------------------------------------------------------------------------------------------

    def _run(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], call: Callable[[Any], Any], device: str | None = None
    ) -> dist.Work:
        """Start an operation: *call* starts it on a backend. Raise `CapturedStep` while a CUDA graph is captured."""
        device_library.refuse_capture(f"`{name}` of group '{self.group_name}'", USE_ENDED_COMMUNICATORS)
        if self.dry_run is not None:
            return DoneWork(name, outputs, inputs, self.dry_run.answer(self, name, outputs, inputs))
        if self.is_broken:
            self.fill_neutral_result(name, outputs, inputs)
            return DoneWork(name, outputs, inputs)
        if self._inner is None:
            self._ready.wait()
            return self._run(name, outputs, inputs, call, device)
        inner, kind = self._inner, (outputs or inputs)[0].device.type if outputs or inputs else ""
        if kind == "meta":  # shapes without values, as torch's own groups take them
            return DoneWork(name, outputs, inputs)
        backend = device or inner.name_for(kind)
        if inner.runs_on_device(backend) and self.transaction.lost:  # its communicators are being aborted: nobody may call one
            self.mark_broken(self.transaction.why)
            return self._run(name, outputs, inputs, call, device)
        return self._start(inner, backend, name, (outputs, inputs), call)

    def _start(
        self, inner: BackendGroup, backend: str, name: str, tensors: tuple[list[Tensor], list[Tensor]], call: Callable[[Any], Any]
    ) -> dist.Work:
        """Start an operation on the *backend* of *inner*; *tensors*: its outputs and inputs."""
        outputs, inputs = tensors
        ended = self.listener.started(self, name, outputs, inputs) if self.listener is not None else None
        self.used = True
        self.operations += 1
        batch, on_device = self._batches.get(threading.get_ident()), inner.runs_on_device(backend)
        if on_device and (batch is None or batch.inner is not inner) and inner.library is not None:
            batch = _Batch(inner, [], [], inner.library.record())
        made = Call(name, outputs, inputs, self.in_flight.enter(name, inputs or outputs))
        try:
            work = inner.call(backend, call) if on_device else call(inner.backend(backend))
        except RuntimeError as error:
            self.in_flight.leave(made.mark)
            self.peer_failed(inner, error)
            self.fill_neutral_result(name, outputs, inputs)
            return DoneWork(name, outputs, inputs)
        if batch is None or not on_device:
            return ManagedWork(self, inner, work, made, ended)
        batch.calls.append(made)
        batch.ended.extend([] if ended is None else [ended])
        if batch is self._batches.get(threading.get_ident()):
            return DoneWork(name, outputs, inputs)  # nobody waits for it: `_end_coalescing` returns the work of all
        return DeviceWork(self, work, batch)

    # -- operations that start as one ---------------------------------------------------------------------------------

    def coalesces(self, device: torch.device) -> bool:
        """Return whether messages between tensors on *device* must start as one to be free of deadlock: those that a device runs."""
        inner = self._inner
        return inner is not None and inner.library is not None and inner.library.tensors == device.type

    def _start_coalescing(self, device: torch.device) -> None:
        """Give the operations that this thread starts from now on to the library, which starts them all at `_end_coalescing`."""
        device_library.refuse_capture(f"a batch of messages of group '{self.group_name}'", USE_ENDED_COMMUNICATORS)
        inner, thread = self._inner, threading.get_ident()
        if self.dry_run is not None or self.is_broken or self.transaction.lost:
            self._batches[thread] = None
            return
        if inner is None:
            self._ready.wait()
            self._start_coalescing(device)
            return
        backend = inner.backend(inner.name_for(device.type))
        if inner.library is None:
            backend._start_coalescing()  # noqa: SLF001 (torch's name)
            return
        try:
            inner.begin_call()  # until `_end_coalescing`: the library keeps what it is given, and calls it all there
        except CommunicatorAborted as error:
            self._batches[thread] = None
            self.peer_failed(inner, error)
            return
        try:
            backend._start_coalescing()  # noqa: SLF001 (torch's name)
            self._batches[thread] = _Batch(inner, [], [], inner.library.record())
        except BaseException:
            inner.end_call()
            raise

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002 (torch's signature)
        """Start them, and return the work of all."""
        batch = self._batches.pop(threading.get_ident(), None)
        if batch is None:
            return DoneWork("coalesced", [], [])
        inner, calls, *_ = batch
        assert inner.library is not None
        try:
            try:
                work = inner.backend(inner.library.name)._end_coalescing()  # noqa: SLF001 (torch's name)
            finally:
                inner.end_call()
        except RuntimeError as error:
            for one in calls:
                self.in_flight.leave(one.mark)
            self.peer_failed(inner, error)
            for one in calls:
                self.fill_neutral_result(*one[:3])
            return DoneWork("coalesced", [], [])
        return DeviceWork(self, work, batch) if calls else DoneWork("coalesced", [], [])

    def end_open_batch(self, device: torch.device) -> None:
        """End a batch of this thread whose end an exception has prevented: what it has given to the library starts.

        The library would collect all later operations of the thread for the batch, and an abort would wait for it.
        """
        if threading.get_ident() in self._batches:
            with suppress(RuntimeError):  # the exception that is being raised counts; a lost peer is noted
                self._end_coalescing(device)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401 (torch's signatures, here and below)
        """See `torch.distributed.all_reduce`."""
        tensors = _as_list(tensors)
        if opts is not None and not isinstance(opts, dist.AllreduceOptions):  # a bare operator, as some callers in torch pass
            bare, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = bare
        opts = _with_work(opts, dist.AllreduceOptions)
        _check_average(opts, tensors)
        return self._run("allreduce", tensors, tensors, lambda backend: backend.allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.all_reduce_coalesced`."""
        tensors, opts = _as_list(tensors), _with_work(opts, dist.AllreduceCoalescedOptions)
        _check_average(opts, tensors)
        return self._run("allreduce_coalesced", tensors, tensors, lambda backend: backend.allreduce_coalesced(tensors, opts))

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.broadcast`."""
        tensors = _as_list(tensors)
        if not isinstance(opts, dist.BroadcastOptions):  # a bare root rank, as some callers in torch pass
            root, opts = int(opts or 0), dist.BroadcastOptions()
            opts.rootRank, opts.rootTensor = root, 0
        opts = _with_work(opts, dist.BroadcastOptions)
        outputs = [] if opts.rootRank == self.rank() else tensors
        return self._run("broadcast", outputs, tensors, lambda backend: backend.broadcast(tensors, opts))

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.reduce`."""
        tensors, opts = _as_list(tensors), _with_work(opts, dist.ReduceOptions)
        _check_average(opts, tensors)
        outputs = tensors if opts.rootRank == self.rank() else []
        return self._run("reduce", outputs, tensors, lambda backend: backend.reduce(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.all_gather`."""
        lists, inputs, opts = [list(one) for one in outputs], _as_list(inputs), _with_work(opts, c10d.AllgatherOptions)
        return self._run("allgather", _flat(lists), inputs, lambda backend: backend.allgather(lists, inputs, opts))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.all_gather_coalesced`."""
        lists, inputs, opts = [list(one) for one in outputs], _as_list(inputs), _with_work(opts, c10d.AllgatherOptions)
        return self._run("allgather_coalesced", _flat(lists), inputs, lambda backend: backend.allgather_coalesced(lists, inputs, opts))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.all_gather_into_tensor`."""
        opts = _with_work(opts, c10d.AllgatherOptions)
        return self._run("all_gather_single", [output], [tensor], lambda backend: backend._allgather_base(output, tensor, opts))  # noqa: SLF001

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.all_gather_into_tensor`, for several."""
        return _WorkGroup([self.all_gather_single(out, one, opts) for out, one in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.reduce_scatter`."""
        outputs, lists, opts = _as_list(outputs), [list(one) for one in inputs], _with_work(opts, dist.ReduceScatterOptions)
        _check_average(opts, outputs)
        return self._run("reduce_scatter", outputs, _flat(lists), lambda backend: backend.reduce_scatter(outputs, lists, opts))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.reduce_scatter_tensor`."""
        opts = _with_work(opts, dist.ReduceScatterOptions)
        _check_average(opts, [output])
        return self._run("reduce_scatter_single", [output], [tensor], lambda backend: backend._reduce_scatter_base(output, tensor, opts))  # noqa: SLF001

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.reduce_scatter_tensor`, for several."""
        return _WorkGroup([self.reduce_scatter_single(out, one, opts) for out, one in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output: Tensor, tensor: Tensor, out_splits: Any, in_splits: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.all_to_all_single`."""
        opts = _with_work(opts, dist.AllToAllOptions)

        def call(backend: Any) -> Any:  # noqa: ANN401
            return backend.alltoall_base(output, tensor, list(out_splits), list(in_splits), opts)

        return self._run("all_to_all_single", [output], [tensor], call)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.all_to_all`."""
        outputs, inputs, opts = _as_list(outputs), _as_list(inputs), _with_work(opts, dist.AllToAllOptions)
        return self._run("alltoall", outputs, inputs, lambda backend: backend.alltoall(outputs, inputs, opts))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.gather`."""
        lists, inputs, opts = [list(one) for one in outputs], _as_list(inputs), _with_work(opts, dist.GatherOptions)
        return self._run("gather", _flat(lists), inputs, lambda backend: backend.gather(lists, inputs, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.scatter`."""
        outputs, lists, opts = _as_list(outputs), [list(one) for one in inputs], _with_work(opts, dist.ScatterOptions)
        return self._run("scatter", outputs, _flat(lists), lambda backend: backend.scatter(outputs, lists, opts))

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.send`."""
        tensors = _as_list(tensors)
        process_waits().operations.append(("send", self.ranks[peer]))
        return self._run(f"send>{peer}", [], tensors, lambda backend: backend.send(tensors, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.recv`."""
        tensors = _as_list(tensors)
        process_waits().operations.append(("recv", self.ranks[peer]))
        return self._run(f"recv<{peer}", tensors, [], lambda backend: backend.recv(tensors, peer, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.recv` without a source."""
        tensors = _as_list(tensors)
        return self._run("recv<any", tensors, [], lambda backend: backend.recv_anysource(tensors, tag))

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ANN401
        """See `torch.distributed.barrier`. It runs on the host where the group carries tensors of it."""
        opts, device = opts or dist.BarrierOptions(), device_library.library()
        if device is None or HOST in self.devices:
            return self._run("barrier", [], [], lambda backend: backend.barrier(opts), device=HOST)
        token = device.empty()
        return self._run("barrier", [], [], lambda backend: backend.allreduce([token], dist.AllreduceOptions()), device=device.name)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: FBT001, FBT002 (torch's signature)
        """See `torch.distributed.monitored_barrier`."""
        limit = self.timeout if timeout is None else timeout
        self._run("monitored_barrier", [], [], lambda backend: _MonitoredBarrier(backend, limit, wait_all_ranks), device=HOST).wait()


class _MonitoredBarrier:
    """A barrier that blocks the caller in gloo, as an operation to wait for: the wait runs in a thread that can be abandoned."""

    def __init__(self, backend: Any, timeout: timedelta, wait_all_ranks: bool) -> None:  # noqa: ANN401, FBT001 (a gloo backend; torch's option)
        self._backend, self._timeout, self._wait_all_ranks = backend, timeout, wait_all_ranks

    def wait(self, _timeout: timedelta | None = None) -> None:
        """Wait for all ranks."""
        self._backend.monitored_barrier(self._timeout, wait_all_ranks=self._wait_all_ranks)


class _WorkGroup(_Work):
    """Several operations started together."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__([one for work in works for one in work.result()])
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all."""
        for work in self._works:
            work.wait(timeout)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of all."""
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def is_completed(self) -> bool:
        """Return whether all have finished."""
        return all(work.is_completed() for work in self._works)


def _as_list(tensors: Any) -> list[Tensor]:  # noqa: ANN401 (torch passes lists, C++ vectors, or one tensor)
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _with_work(opts: Any, kind: Callable[[], Any]) -> Any:  # noqa: ANN401 (any of torch's options)
    """Return *opts*, or the defaults of *kind*, so that the backend returns a work to wait for.

    torch asks for none where the script waits at once: NCCL then puts the operation into the script's own stream, and returns None.
    """
    opts = opts or kind()
    opts.asyncOp = True
    return opts


def _check_average(opts: Any, tensors: list[Tensor]) -> None:  # noqa: ANN401 (any of torch's options with a `reduceOp`)
    """Refuse the average of whole numbers on gloo before anything is sent: gloo adds them up and then fails in the division."""
    one = tensors[0]
    if opts.reduceOp == dist.ReduceOp.AVG and one.device.type == "cpu" and not (one.is_floating_point() or one.is_complex()):
        raise RuntimeError(
            f"ReduceOp.AVG does not work for {one.dtype} on gloo, which cannot divide whole numbers: "
            "use ReduceOp.SUM and divide, or convert the tensor to a floating-point type"
        )


def _flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [one for some in lists for one in some]


for _kind in (ManagedGroup, ManagedWork, DeviceWork, DoneWork, _Work, _WorkGroup):
    skip_compilation(*(one for one in vars(_kind).values() if isinstance(one, FunctionType)))
