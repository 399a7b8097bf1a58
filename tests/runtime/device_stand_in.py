"""A device without a GPU: collectives whose wait returns at once, and whose results arrive later, in order, from queues of threads.

It implements `holdfast.runtime.groups.device_library.DeviceLibrary` over gloo and tensors of the host, as `Nccl` does over NCCL. It behaves
as CUDA and NCCL do where the runtime depends on it:

- The device has one queue of computation, and one for each communicator. An operation starts when the queue of computation has come to the
  place where it was given to the library; a wait for it holds up that queue, and not the host.
- An operation whose peer has died, or has aborted, never ends by itself. It occupies the device until its communicator is aborted; whether
  the library reports an error meanwhile is a setting, as that depends on what connects the ranks (`reports_errors`).
- A work that was asked whether it has run, after its communicator has failed, says so, and its wait aborts that communicator alone.
- An abort waits until the whole device is idle, so that aborting one communicator after the other waits for ever.
- A call that starts an operation may block (`launches`). An abort meanwhile takes the communicator from under it, and it never returns.
- A collective whose options ask for no work (``asyncOp``) holds up the queue of computation by itself, and returns None.
- While a shutdown waits for the other members (`closings`) it holds the communicator, and no abort of it begins.
- A message that is started by itself ends when the other rank has begun to receive it; two ranks that both send first deadlock. Messages
  that are started as one do not.

What computes with the results must wait for the device first (`synchronize`), as the computation itself runs on the host. It lies beside
the tests and not in the package, as no user's job may ever run on it. It validates the runtime's logic, and not NCCL.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.runtime.groups.backends import HOST, BackendGroup, BuildOptions, build
from holdfast.runtime.groups.device_library import Communicator

ACKNOWLEDGED = 0x4ACC
"""The tag of the messages that acknowledge others."""


class Queue:
    """A queue of the device: what is put into it runs in order."""

    def __init__(self, name: str) -> None:
        self._items: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.put = self._items.put
        threading.Thread(target=self._work, name=f"device-{name}", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._items.get()()


class Event:
    """A place in a queue."""

    def __init__(self, device: StandIn) -> None:
        self._device, self.passed, self.at = device, threading.Event(), 0.0

    def fire(self) -> None:
        """Record that the queue has come here."""
        self.at = time.perf_counter()
        self.passed.set()

    def query(self) -> bool:
        """Return whether the queue has come here; raise what torch raises when the device has failed."""
        if self._device.broken:
            raise torch.AcceleratorError(self._device.broken)
        return self.passed.is_set()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from here to *end*."""
        assert self.passed.is_set()
        assert end.passed.is_set()
        return (end.at - self.at) * 1000


class Work:
    """An operation in the queue of a communicator."""

    def __init__(self, device: StandIn, communicator: StandInCommunicator, outputs: list[Tensor]) -> None:
        self._device, self._communicator, self._outputs, self.done = device, communicator, outputs, Event(device)
        self._failed = ""

    def wait(self) -> bool:
        """Have the queue of computation wait, and return."""
        self._device.computation.put(self.done.passed.wait)
        if self._failed:
            self._communicator.abort()
            raise dist.DistBackendError(f"NCCL error: {self._failed}")
        return True

    def is_completed(self) -> bool:
        """Return whether it has run, or its communicator has failed."""
        if not self._communicator.aborted.is_set() and self._device.failure(self._communicator):
            self._failed = self._communicator.error
        return bool(self._failed) or self.done.passed.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is fulfilled: its values arrive when the device has run it."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class StandInCommunicator:
    """The backend of one group."""

    supports_coalescing = True

    def __init__(self, device: StandIn, gloo: BackendGroup, rank: int, timeout: timedelta) -> None:
        self._device, self._gloo, self._rank, self._timeout = device, gloo, rank, timeout
        self._queue = Queue(f"communicator-{len(device.communicators)}")
        self.aborted = threading.Event()
        self.ended = threading.Event()
        """Set when the abort has returned."""
        self.finished = threading.Event()
        """Set when it has ended without an abort."""
        self.error = ""
        self.entered = 0
        """Calls that were to start an operation."""
        self.running = 0
        """Operations that occupy the device: those in the queue."""
        self.batches: list[int] = []
        """How many messages each batch had that was started as one."""
        self._batch: list[Callable[[], list[tuple[str, Any]]]] | None = None
        self._lock = threading.Lock()
        self._held = threading.Lock()
        """Held by a shutdown or an abort."""

    # -- operations ---------------------------------------------------------------------------------------------------

    def _start(self, outputs: list[Tensor], begin: Callable[[], list[tuple[str, Any]]]) -> Work:
        """Put an operation into the queue: *begin* starts it on gloo and returns what there is to wait for, by name."""
        self.entered += 1
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        if not self._device.launches.is_set():
            self._device.blocked.set()
            self._device.launches.wait()
            if self.aborted.is_set():
                threading.Event().wait()  # as torch does that asks NCCL for the state of a communicator that is gone
        if self._device.refuses:
            raise dist.DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a remote process exited prematurely")
        work, ready = Work(self._device, self, outputs), self._device.record()
        with self._lock:
            self.running += 1

        def run() -> None:
            while not ready.passed.wait(0.005) and not self.aborted.is_set():
                pass
            if not self.aborted.is_set():
                self._run(begin)
            with self._lock:
                self.running -= 1
            work.done.fire()

        self._queue.put(run)
        return work

    def _run(self, begin: Callable[[], list[tuple[str, Any]]]) -> None:
        """Run an operation; one that fails goes on until it is aborted."""
        try:
            ended = all(self._gloo.waits.wait(name, work, timedelta(minutes=5)) for name, work in begin())
        except RuntimeError as error:
            ended, self.error = False, str(error)
        if not ended:
            self.aborted.wait()

    def _collective(self, name: str, outputs: list[Tensor], opts: Any, call: Callable[[Any], Any]) -> Work | None:
        gloo = self._gloo.backend(HOST)
        work = self._start(outputs, lambda: [(name, call(gloo))])
        if opts.asyncOp:
            return work
        work.wait()
        return None

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch's."""
        return self._collective("allreduce", tensors, opts, lambda gloo: gloo.allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch's."""
        return self._collective("allreduce_coalesced", tensors, opts, lambda gloo: gloo.allreduce_coalesced(tensors, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch's."""
        return self._collective("broadcast", tensors, opts, lambda gloo: gloo.broadcast(tensors, opts))

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Work | None:
        return self._collective("all_gather_single", [output], opts, lambda gloo: gloo._allgather_base(output, tensor, opts))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work | None:
        """Send, and wait until the other rank receives."""

        def begin(gloo: Any) -> list[tuple[str, Any]]:
            return [("send", gloo.send(tensors, peer, tag)), ("recv", gloo.recv([torch.zeros(1)], peer, ACKNOWLEDGED))]

        return self._message([], begin)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work | None:
        """Receive, and acknowledge it."""

        def begin(gloo: Any) -> list[tuple[str, Any]]:
            return [("recv", gloo.recv(tensors, peer, tag)), ("send", gloo.send([torch.ones(1)], peer, ACKNOWLEDGED))]

        return self._message(tensors, begin)

    def _message(self, outputs: list[Tensor], begin: Callable[[Any], list[tuple[str, Any]]]) -> Work | None:
        gloo = self._gloo.backend(HOST)
        if self._batch is None:
            return self._start(outputs, lambda: begin(gloo))
        self._batch.append(lambda: begin(gloo))
        return None  # as NCCL: the batch has the work

    def _start_coalescing(self) -> None:
        assert self._batch is None
        self._batch = []

    def _end_coalescing(self) -> Work | None:
        batch, self._batch = self._batch, None
        assert batch is not None
        if not batch:
            return None
        self.batches.append(len(batch))
        return self._start([], lambda: [one for begin in batch for one in begin()])

    # -- state --------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End all operations, and wait until the device is idle."""
        with self._held:
            self.aborted.set()
            self._device.hangs.wait()
            self._gloo.cut()
            while any(one.running for one in self._device.communicators):
                time.sleep(0.002)
            self._gloo.close()
            self.ended.set()

    def shutdown(self) -> None:
        """Wait until all operations have run, and close the connections."""
        with self._held:
            while self.running:
                time.sleep(0.002)
            self._device.closings.wait()
            self._gloo.close()
            self.finished.set()

    def _group_start(self) -> None:
        self._device.depth.value = getattr(self._device.depth, "value", 0) + 1

    def _group_end(self) -> None:
        self._device.depth.value -= 1

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        return 0


class StandIn:
    """The device, and its library."""

    name, tensors = "stand-in", "cpu"

    def __init__(self, *, reports_errors: bool = True) -> None:
        self.reports_errors = reports_errors
        self.computation = Queue("computation")
        self.communicators: list[StandInCommunicator] = []
        self.broken = ""
        """The error of every call from now on: the device has failed."""
        self.refuses = False
        """Whether no communicator takes another operation, as one does that has failed."""
        self.capturing = False
        """Whether a graph is captured: see `capture`."""
        self.prepared = 0
        self.connecting = 0
        """Communicators that have begun to connect."""
        self.hangs = threading.Event()
        """Cleared while no abort comes to its end."""
        self.hangs.set()
        self.connects = threading.Event()
        """Cleared while no communicator comes to be connected."""
        self.connects.set()
        self.launches = threading.Event()
        """Cleared while no call that starts an operation returns."""
        self.launches.set()
        self.blocked = threading.Event()
        """Set when such a call has begun to wait."""
        self.closings = threading.Event()
        """Cleared while no shutdown comes to its end."""
        self.closings.set()
        self.depth = threading.local()
        """Open groups of the library, by thread."""

    def prepare(self) -> None:
        """Count the calls."""
        self.prepared += 1

    def adopt_thread(self) -> None:
        """Do nothing: there is one device."""

    def connect(self, store: dist.Store, group: Communicator, is_cancelled: Callable[[], bool]) -> StandInCommunicator:
        """Connect over gloo. Where it waits for `connects` nobody can call it off, as within NCCL."""
        self.connecting += 1
        self.connects.wait()
        options = BuildOptions(devices=(HOST,), timeout=group.timeout, host=group.host, first=True)
        gloo = build(store, "gloo", group.rank, len(group.ranks), options=options, is_cancelled=is_cancelled)
        made = StandInCommunicator(self, gloo, group.rank, group.timeout)
        self.communicators.append(made)
        return made

    @contextmanager
    def grouped(self, backends: Sequence[Any]) -> Iterator[None]:
        """Open a group of the library."""
        backends[0]._group_start()
        try:
            yield
        finally:
            backends[0]._group_end()

    def failure(self, backend: StandInCommunicator) -> str:
        """Return the error of an operation that occupies the device."""
        return backend.error if self.reports_errors else ""

    def queue(self) -> int:
        """There is one queue of computation."""
        return 0

    def record(self) -> Event:
        """Return an event at the end of the queue of computation."""
        event = Event(self)
        self.computation.put(event.fire)
        return event

    def is_capturing(self) -> bool:
        """Return whether a graph is captured."""
        return self.capturing

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Pretend to capture a graph of what is computed within the context, as `torch.cuda.graph` does."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def empty(self) -> Tensor:
        """Return a tensor of one element."""
        return torch.zeros(1)

    def stall(self) -> threading.Event:
        """Have the queue of computation stand still until the result is set, as during a long kernel."""
        released = threading.Event()
        self.computation.put(released.wait)
        return released

    def synchronize(self) -> None:
        """Wait until the device has done all its work, without a way out, as `torch.cuda.synchronize` does."""
        self.record().passed.wait()
        while any(one.running for one in self.communicators):
            time.sleep(0.001)
