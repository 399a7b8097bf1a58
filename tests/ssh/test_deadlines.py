"""Deadlines of calls that have none of their own."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.cluster.ssh.deadlines import cut_at, in_time
from tests.waiting import wait_until

LONG = 60.0


def test_only_what_is_late_is_cut_off() -> None:
    """A cut that fails does not affect the others."""
    cut, ended = list[str](), threading.Event()

    def fails() -> None:
        cut.append("fails")
        raise OSError

    now = time.monotonic()
    with cut_at(now + LONG, lambda: cut.append("never")), cut_at(now + 0.05, ended.set), cut_at(now + 0.01, fails):
        with cut_at(now + LONG, lambda: cut.append("in time")):
            pass
        assert ended.wait(60)
        wait_until(lambda: cut, seconds=60)
    assert cut == ["fails"]


def test_a_block_that_ended_in_time_leaves_no_thread() -> None:
    """Its deadline is cancelled, not waited for."""
    before = set(threading.enumerate())
    with cut_at(time.monotonic() + LONG, lambda: None):
        started = set(threading.enumerate()) - before
    assert started
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_a_call_without_an_answer_times_out() -> None:
    """The answer, the error, or neither."""
    never = threading.Event()
    assert in_time(LONG, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        in_time(LONG, lambda: 1 // 0)
    with pytest.raises(TimeoutError):
        in_time(0.01, never.wait)
    never.set()
