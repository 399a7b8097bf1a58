"""Deadlines for calls that have none: several of paramiko's wait without one, and so does a full socket."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(order=True, slots=True)
class Deadline:
    """Something to cut off at a time (monotonic)."""

    until: float
    number: int
    cut: Callable[[], None] | None = field(compare=False)


class Watchdog:
    """Cuts off what exceeds its deadline; one thread serves all deadlines."""

    def __init__(self) -> None:
        self._deadlines: list[Deadline] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="ssh deadlines", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, until: float, cut: Callable[[], None]) -> Iterator[None]:
        """Call *cut* at *until* (monotonic), unless the block has ended by then."""
        deadline = Deadline(until, next(self._numbers), cut)
        with self._changed:
            heapq.heappush(self._deadlines, deadline)
            if self._deadlines[0] is deadline:
                self._changed.notify()
        try:
            yield
        finally:
            deadline.cut = None  # it stays in the heap until its time, where it costs nothing

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                left = self._deadlines[0].until - time.monotonic() if self._deadlines else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                cut = heapq.heappop(self._deadlines).cut
            if cut is not None:  # in its own thread: closing a channel of a jump host may wait too
                threading.Thread(target=_run, args=(cut,), name="ssh cut", daemon=True).start()


def _run(cut: Callable[[], None]) -> None:
    with suppress(Exception):  # it may be closed already
        cut()


def in_time(seconds: float, act: Callable[[], T]) -> T:
    """Return the result of *act*; raise ``TimeoutError`` when it takes longer than *seconds*, and leave it running.

    For calls that cannot be cut off: a name lookup, and the SSH agent.
    """
    done: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            done.append(act())
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=run, name="in time", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if errors:
        raise errors[0]
    if not done:
        raise TimeoutError
    return done[0]
