"""Waits that end when their group is cut, also where gloo does not end them.

gloo wakes who waits when a connection breaks, but forgets two: whose message was sent in part and whose message was received in part
(``Pair::signalException`` in gloo/transport/tcp/pair.cc goes through the operations that have not begun and leaves out those in work).
They would wait until the group's time-out, half an hour as torch sets it. So nobody waits in gloo itself here.

A wait for a collective looks up now and then. Where that cannot be (`ASIDE`) it is done by a thread that can be left behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

Future: TypeAlias = torch.futures.Future[Any]

SLICE: Final = timedelta(seconds=0.1)
"""How long a wait for a collective goes without a look at whether its group was cut. A wait that ends by this has no other effect."""

ASIDE: Final = ("send", "recv", "reduce_scatter")
"""How the names of operations begin that are waited for in a thread of their own. To gloo's group the last are an operation of another kind
and what to do after it (``LambdaWork`` in torch's ProcessGroupGloo.cpp), whose ``wait`` takes no time-out and which never is completed."""


def sleeps(thread: int) -> bool:
    """Tell whether a thread of this process (its number in the kernel) waits for something, or is no more."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return True


class Waits:
    """The waits for operations of one group's present connections."""

    def __init__(self) -> None:
        self.over = False
        """The group was cut, and nothing that it had in work can come to an end, or touch a tensor, any more."""
        self.left = False
        """Something was given up that gloo still waits for."""
        self._open: set[Callable[[], None]] = set()
        self._aside: set[_Task] = set()
        """What other threads wait for."""
        self._lock = threading.Lock()

    def open(self, end: Callable[[], None]) -> None:
        """Have *end* called when all is over, unless it is closed before."""
        with self._lock:
            if not self.over:
                self._open.add(end)
                return
        end()

    def close(self, end: Callable[[], None]) -> None:
        """Forget *end*: what it was for came to an end by itself."""
        with self._lock:
            self._open.discard(end)

    def end(self) -> None:
        """End all waits, those of the future too."""
        with self._lock:
            self.over, ends = True, list(self._open)
            self.left = self.left or bool(ends)
            self._open.clear()
        for end in ends:
            end()

    def are_asleep(self) -> bool:
        """Tell whether every thread that waits for another does nothing but that: one that has woken up may still write what has come."""
        return all(one.thread is not None and sleeps(one.thread) for one in list(self._aside))

    def wait(self, name: str, work: Any, timeout: timedelta) -> bool:  # noqa: ANN401 (torch's work)
        """Wait for the operation *name* as its own ``wait`` does; tell whether it came to an end."""
        return self._aside_for(work, timeout) if name.startswith(ASIDE) else self._in_slices(work, timeout)

    def _in_slices(self, work: Any, timeout: timedelta) -> bool:  # noqa: ANN401
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while True:
            try:
                work.wait(SLICE)
            except RuntimeError:
                if not work.is_completed():
                    if self.over:
                        self.left = True
                        return False
                    if deadline is None or time.monotonic() < deadline:
                        continue
                    raise
            else:
                return True
            work.wait()  # it ended in this very moment, or raises what it ended with
            return True

    def _aside_for(self, work: Any, timeout: timedelta) -> bool:  # noqa: ANN401
        """Have another thread wait. A wait for a message that ran out of time would break all connections, so it is not had in slices."""
        task = _Task(lambda: work.wait(timeout) if timeout else work.wait())
        self._aside.add(task)
        self.open(task.given_up)
        _WaitThread.take(task)
        task.done.wait()
        self.close(task.given_up)
        self._aside.discard(task)
        if task.error is not None:
            raise task.error
        return task.ended

    def promise(self, theirs: Future, settle: Callable[[Future], Any], give_up: Callable[[], Any]) -> Future:
        """Return a future of what *settle* makes of *theirs*, or of what *give_up* returns once all is over.

        Only one of the two is called.
        """
        ours: Future = torch.futures.Future()
        first = threading.Lock()

        def fulfil(make: Callable[[], Any]) -> None:
            if first.acquire(blocking=False):
                try:
                    ours.set_result(make())
                except BaseException as error:  # noqa: BLE001 (in a thread of torch's: raised where the future is waited for)
                    ours.set_exception(error)

        def end() -> None:
            fulfil(give_up)

        def ended(future: Future) -> None:
            self.close(end)
            fulfil(lambda: settle(future))

        self.open(end)
        theirs.add_done_callback(ended)
        return ours


class _Task:
    """A wait that another thread does."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.done = threading.Event()
        self.thread: int | None = None
        """The number of the thread that does it, once one has begun."""
        self.ended = False
        self.error: BaseException | None = None
        self.given_up = self.done.set  # one and the same object each time, as `Waits` knows it by

    def carry_out(self) -> None:
        """Wait, and say how it ended."""
        self.thread = threading.get_native_id()
        try:
            self.call()
            self.ended = True
        except BaseException as error:  # noqa: BLE001 (raised where the wait was asked for)
            self.error = error
        self.done.set()


class _WaitThread:
    """A thread that waits for others, as often as it comes back from it."""

    _free: Final[list[_WaitThread]] = []

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="holdfast-waiter", daemon=True).start()

    @classmethod
    def take(cls, task: _Task) -> None:
        """Have one that is free do *task*."""
        try:
            waiter = cls._free.pop()
        except IndexError:
            waiter = cls()
        waiter._tasks.put(task)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            task.carry_out()
            del task
            self._free.append(self)
