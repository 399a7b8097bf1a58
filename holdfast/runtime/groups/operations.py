"""What happens to one operation of a managed group: the step it belongs to, its progress, its wait, and its result when a peer is lost.

gloo wakes a waiting thread when a connection breaks, except for messages that were partly sent or partly received
(``Pair::signalException`` in gloo/transport/tcp/pair.cc skips operations in progress). Those would wait until the group's timeout, half an
hour by torch's default. So no thread waits in gloo without a way out: a wait for a collective polls, and a wait that cannot poll
(`BLOCKING`) runs in a thread that can be abandoned.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from holdfast.runtime.groups import torch_interface

Future: TypeAlias = torch.futures.Future[Any]

MAX_REASON: Final = 500
"""Characters of an error message that are kept as the reason of a lost step."""
COLLECTIVES: Final = ""
"""The channel of operations that all members take part in."""
MAX_PENDING: Final = 64
"""Pending operations that are remembered: a script that never waits for its sends would fill the memory otherwise."""
WAIT_INTERVAL: Final = timedelta(seconds=0.1)
"""Time between two checks whether the group was cut, during a wait for a collective. A wait that ends by this has no other effect."""
BLOCKING: Final = ("send", "recv", "reduce_scatter", "monitored_barrier")
"""Name prefixes of operations whose wait runs in its own thread.

In gloo a monitored barrier is one blocking call, and a reduce-scatter is another operation plus a follow-up (``LambdaWork`` in torch's
ProcessGroupGloo.cpp): its ``wait`` takes no timeout, and it never reports completion.
"""


# -- what is not compiled -------------------------------------------------------------------------------------------------


def skip_compilation(*functions: Callable[..., object]) -> None:
    """Have ``torch.compile`` leave *functions*, and what they call, as they are.

    torch calls a group's methods from C++ in the middle of compiled code, for example where DDP broadcasts buffers, and would compile them
    as well. The decorator ``torch.compiler.disable`` does the same and imports the compiler for it, which takes a second. A torch that
    lacks what is called here has no managed groups, and nothing to leave.
    """
    if torch_interface.missing():
        return
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001 (what the decorator calls)
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # noqa: SLF001 (as above)
    for one in functions:
        frames.set_code_exec_strategy(one.__code__, skip)


# -- the step -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StepTransaction:
    """What failed between two step boundaries. Written by the training thread, autograd's threads and the command thread.

    A failure interrupts nothing: it is recorded here, and the commit vote at the end of the step reads it.
    """

    lost: bool = False
    """A peer was lost, or the controller ended this generation: the step will not be committed."""
    why: str = ""
    damaged: int = 0
    """Operations that returned a neutral result in place of what a lost peer would have sent."""
    final: bool = False
    """The current work is never retried nor undone: the script is before its first step, between two, or after its last."""
    broken: set[str] = field(default_factory=set)
    """Names of groups in which an operation failed: their connections are unusable."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, why: str, group: str | None = None) -> None:
        """Record the loss of a peer; the first reason stays, as later ones are secondary failures."""
        with self._lock:
            if not self.lost:
                self.why = why[:MAX_REASON]
            self.lost = True
            if group is not None:
                self.broken.add(group)

    def renew(self) -> None:
        """Start over with repaired groups."""
        with self._lock:
            self.lost, self.why = False, ""
            self.broken.clear()


# -- progress -----------------------------------------------------------------------------------------------------------


class OperationMark(NamedTuple):
    """An operation that has started."""

    channel: str
    number: int
    """Its 1-based index within its channel on the current connections."""
    name: str
    size: int
    """Elements of its first tensor."""
    dtype: Any
    """Element type; None where it has no tensor."""
    since: float
    """Start time (`time.perf_counter`)."""


class _OnDevice(NamedTuple):
    """Operations that a device runs as one: whether it has come to them, and whether it has run them."""

    marks: Sequence[OperationMark]
    is_reached: Callable[[], bool]
    is_completed: Callable[[], bool]


class InFlightOperations:
    """Progress of this rank in one group: operations started on the current connections, and those not finished yet.

    Members of a group count its collectives alike, so the same number is the same operation on every rank. Messages between two ranks are
    counted per channel (``send>3``, ``recv<3``) and compared with the other end's count.
    """

    __slots__ = ("_on_device", "counts", "pending")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Operations started, by channel."""
        self.pending: dict[tuple[str, int], OperationMark] = {}
        """Operations not known to have finished, oldest first."""
        self._on_device: deque[_OnDevice] = deque()
        """Operations that a device runs, in its order."""

    def enter(self, name: str, tensors: list[Tensor]) -> OperationMark:
        """Record the start of an operation."""
        channel = name if name[4:5] in (">", "<") else COLLECTIVES
        self.settle()
        number = self.counts[channel] = self.counts.get(channel, 0) + 1
        size, dtype = (tensors[0].numel(), tensors[0].dtype) if tensors else (0, None)
        mark = OperationMark(channel, number, name, size, dtype, time.perf_counter())
        if len(self.pending) >= MAX_PENDING:
            self.pending.pop(next(iter(self.pending), (channel, 0)), None)
        self.pending[channel, number] = mark
        return mark

    def leave(self, mark: OperationMark) -> None:
        """Record its end; callable from any thread."""
        self.pending.pop((mark.channel, mark.number), None)

    def follow(self, marks: Sequence[OperationMark], is_reached: Callable[[], bool], is_completed: Callable[[], bool]) -> None:
        """Keep these operations, which start as one, in flight until the device has run them: the host does not wait for that."""
        self._on_device.append(_OnDevice(marks, is_reached, is_completed))

    def settle(self) -> bool:
        """Record the end of what the device has run meanwhile; return whether it has run all. Callable from any thread.

        A device runs the operations of one group in their order, so usually one look is enough.
        """
        running = self._on_device
        with suppress(IndexError):  # another thread has taken the last one
            while running:
                first = running[0]
                if not first.is_completed():
                    return False
                for mark in first.marks:  # before it is taken away: who finds nothing running must find no mark either
                    self.leave(mark)
                with suppress(ValueError):  # another thread has taken it
                    running.remove(first)
        return not running

    def progress(self) -> tuple[dict[str, int], list[OperationMark]]:
        """Return the operations that have begun, by channel, and those of them that are not known to have finished.

        An operation of a device has begun when the device has come to it. The host is ahead: it has given the device operations before
        which a computation, or a wait in another group, still runs.
        """
        self.settle()
        counts, pending = dict(self.counts), dict(self.pending)
        for one in list(self._on_device):
            if not one.is_reached():
                for mark in one.marks:
                    counts[mark.channel] = min(counts[mark.channel], mark.number - 1)
                    pending.pop((mark.channel, mark.number), None)
        return counts, list(pending.values())

    def forget(self) -> None:
        """Start over on other connections."""
        self.counts, self.pending, self._on_device = {}, {}, deque()


# -- waiting ------------------------------------------------------------------------------------------------------------


def is_asleep(thread: int) -> bool:
    """Return whether a thread of this process (by kernel id) sleeps or has exited."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return True


class Waits:
    """The waits for operations on the current connections of one group."""

    def __init__(self) -> None:
        self.over = False
        """The group was cut, and none of its operations can finish or write to a tensor any more."""
        self.abandoned = False
        """A wait was abandoned that gloo still holds on to."""
        self._open: set[Callable[[], None]] = set()
        self._blocking: set[_Task] = set()
        """Waits that run in other threads."""
        self._lock = threading.Lock()

    def open(self, end: Callable[[], None]) -> None:
        """Call *end* when all waits end, unless it is closed before."""
        with self._lock:
            if not self.over:
                self._open.add(end)
                return
        end()

    def close(self, end: Callable[[], None]) -> None:
        """Forget *end*: its operation finished by itself."""
        with self._lock:
            self._open.discard(end)

    def end(self) -> None:
        """End all waits, present and future."""
        with self._lock:
            self.over, ends = True, list(self._open)
            self.abandoned = self.abandoned or bool(ends)
            self._open.clear()
        for end in ends:
            end()

    def are_asleep(self) -> bool:
        """Return whether every waiting thread sleeps: one that has woken up may still write received data."""
        return all(one.thread is not None and is_asleep(one.thread) for one in list(self._blocking))

    def wait(self, name: str, work: Any, timeout: timedelta) -> bool:  # noqa: ANN401 (torch's work)
        """Wait for the operation *name* as its own ``wait`` does; return whether it finished."""
        if name.startswith(BLOCKING):
            return self._wait_in_thread(work, timeout)
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while True:
            try:
                work.wait(WAIT_INTERVAL)
            except RuntimeError:
                if not work.is_completed():
                    if self.over:
                        self.abandoned = True
                        return False
                    if deadline is None or time.monotonic() < deadline:
                        continue
                    raise
            else:
                return True
            work.wait()  # it finished at this very moment, or raises the error that ended it
            return True

    def _wait_in_thread(self, work: Any, timeout: timedelta) -> bool:  # noqa: ANN401
        """Wait in another thread. A wait for a message that times out would break all connections, so this one cannot poll.

        gloo's reduce-scatter writes its output in this wait. Where the thread that calls is below autograd, that must not count as a change
        of the tensor: selective activation checkpointing refuses one that has changed.
        """
        dispatch: Any = torch._C  # noqa: SLF001 (torch has no public way to ask)
        below = dispatch._dispatch_tls_is_dispatch_key_excluded(dispatch.DispatchKey.ADInplaceOrView)  # noqa: SLF001 (as above)

        def wait() -> None:
            with dispatch._AutoDispatchBelowADInplaceOrView() if below else nullcontext():  # noqa: SLF001 (as above)
                work.wait(*[timeout] if timeout else [])

        task = _Task(wait)
        self._blocking.add(task)
        self.open(task.abandon)
        _WaitThread.run(task)
        task.done.wait()
        self.close(task.abandon)
        self._blocking.discard(task)
        if task.error is not None:
            raise task.error
        return task.finished

    def promise(self, theirs: Future, settle: Callable[[Future], Any], abandon: Callable[[], Any]) -> Future:
        """Return a future of what *settle* makes of *theirs*, or of what *abandon* returns once all waits end; one of the two is called."""
        outcome: Future = torch.futures.Future()
        first = threading.Lock()

        def fulfil(make: Callable[[], Any]) -> None:
            if first.acquire(blocking=False):
                made: list[Any] = [None, None]
                try:
                    made[0] = make()
                except BaseException as error:  # noqa: BLE001 (in a thread of torch's: raised where the future is waited for)
                    made[1] = error
                outcome.set_result(made)

        def end() -> None:
            fulfil(abandon)

        def ended(future: Future) -> None:
            self.close(end)
            fulfil(lambda: settle(future))

        self.open(end)
        theirs.add_done_callback(ended)
        return outcome.then(_result_of)


def _result_of(outcome: Future) -> Any:  # noqa: ANN401 (of any operation)
    """Return or raise what an operation ended with.

    For C++ (DDP's reducer) an error is only what a callback raises: one that is set from Python arrives there as a value, and crashes it.
    """
    result, error = outcome.value()
    if error is not None:
        raise error
    return result


class _Task:
    """A wait that runs in another thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.done = threading.Event()
        self.thread: int | None = None
        """Kernel id of the thread that runs it, once it has started."""
        self.finished = False
        self.error: BaseException | None = None
        self.abandon = self.done.set  # one object, as `Waits` recognises it by identity


class _WaitThread:
    """A reusable thread that runs blocking waits; one whose wait never returns is left behind."""

    _free: Final[list[_WaitThread]] = []

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="holdfast-waiter", daemon=True).start()

    @classmethod
    def run(cls, task: _Task) -> None:
        """Run *task* in a free thread."""
        try:
            waiter = cls._free.pop()
        except IndexError:
            waiter = cls()
        waiter._tasks.put(task)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            task.thread = threading.get_native_id()
            try:
                task.call()
                task.finished = True
            except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
                task.error = error
            task.done.set()
            del task
            self._free.append(self)


# -- results when no peer answers -----------------------------------------------------------------------------------------


def fill_neutral_result(name: str, place: int, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Fill *outputs* as if every member had given the same inputs as this one, whose index is *place*; data from one peer is zeros."""
    with torch.no_grad():
        for one, value in zip(outputs, _neutral_values(name, place, outputs, inputs), strict=True):
            if value is None:
                one.detach().zero_()
            elif value is not one:
                one.detach().view(value.shape).copy_(value)


def _neutral_values(name: str, place: int, outputs: list[Tensor], inputs: list[Tensor]) -> Sequence[Tensor | None]:
    """Return a value for each of *outputs*, in a shape it can be viewed in; None means zeros."""
    if name in ("allgather", "gather"):
        return [inputs[number * len(inputs) // len(outputs)] for number in range(len(outputs))]
    if name == "allgather_coalesced":  # all tensors of one member, then all of the next
        return [inputs[number % len(inputs)] for number in range(len(outputs))]
    if name == "all_gather_single":
        return [inputs[0].reshape(1, -1).expand(outputs[0].numel() // max(1, inputs[0].numel()), -1)]
    if name in ("reduce_scatter", "reduce_scatter_single"):
        return inputs[place : place + 1] if name == "reduce_scatter" else [inputs[0].reshape(-1, outputs[0].numel())[place]]
    if name.startswith(("recv", "scatter", "all_to_all", "alltoall")):
        given = [*inputs, *[None] * len(outputs)]
        return [one if one is not None and one.numel() == out.numel() else None for out, one in zip(outputs, given, strict=False)]
    return outputs  # a reduction or a broadcast: the outputs already hold this member's values
