"""Deadlines that hold. Several of paramiko's calls wait without one, and so does a full socket: what is late is cut off under them."""

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
    """Something that is cut off when its time has come."""

    until: float
    number: int
    cut: Callable[[], None] | None = field(compare=False)


class Watchdog:
    """One thread for all deadlines."""

    def __init__(self) -> None:
        self._watches: list[Deadline] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="ssh deadlines", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, until: float, cut: Callable[[], None]) -> Iterator[None]:
        """Call *cut* at *until* (monotonic), unless the block has ended by then."""
        watch = Deadline(until, next(self._numbers), cut)
        with self._changed:
            heapq.heappush(self._watches, watch)
            if self._watches[0] is watch:
                self._changed.notify()
        try:
            yield
        finally:
            watch.cut = None  # it stays in the heap until its time: there it costs nothing

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._over:
                    return
                left = self._watches[0].until - time.monotonic() if self._watches else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                cut = heapq.heappop(self._watches).cut
            if cut is not None:  # in a thread of its own, as to say goodbye through a jump host may wait too
                threading.Thread(target=_done, args=(cut,), name="ssh cut", daemon=True).start()


def _done(cut: Callable[[], None]) -> None:
    with suppress(Exception):  # what is to be cut off may be gone already
        cut()


def in_time(seconds: float, act: Callable[[], T]) -> T:
    """Return what *act* returns; raise `TimeoutError` when it does not within *seconds*. Nobody waits for it after that.

    For what cannot be cut off: asking a name server, and the SSH agent.
    """
    done: list[T] = []
    wrong: list[BaseException] = []

    def run() -> None:
        try:
            done.append(act())
        except BaseException as error:  # noqa: BLE001 (handed over to who waits)
            wrong.append(error)

    thread = threading.Thread(target=run, name="in time", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if wrong:
        raise wrong[0]
    if not done:
        raise TimeoutError
    return done[0]
