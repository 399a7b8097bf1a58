"""Deadlines for calls that have none: several of paramiko's wait without one, and so does a full socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def cut_at(until: float, cut: Callable[[], None]) -> Iterator[None]:
    """Call *cut* at *until* (monotonic), in another thread, unless the block has ended by then."""

    def run() -> None:
        with suppress(Exception):  # it may be closed already
            cut()

    timer = threading.Timer(max(0.0, until - time.monotonic()), run)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
