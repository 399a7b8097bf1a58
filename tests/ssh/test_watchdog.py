"""Deadlines that hold, whatever is late."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.cluster.ssh.watchdog import Watchdog, in_time

LONG = 60.0


def test_only_what_is_late_is_cut_off() -> None:
    """In the order of their deadlines, not in that in which they came; a cut that fails harms no other."""
    dog, cut, ended = Watchdog(), [], threading.Event()

    def fails() -> None:
        cut.append("fails")
        raise OSError

    now = time.monotonic()
    with dog.over(now + LONG, lambda: cut.append("never")), dog.over(now + 0.02, ended.set), dog.over(now + 0.01, fails):
        with dog.over(now + 0.015, lambda: cut.append("in time")):
            pass
        assert ended.wait(10)
    dog.close()
    assert cut == ["fails"]


def test_a_watchdog_that_is_closed_has_no_thread() -> None:
    """Whatever it still watched."""
    dog = Watchdog()
    with dog.over(time.monotonic() + LONG, lambda: None):
        dog.close()
    assert not dog._thread.is_alive()


def test_a_call_without_an_answer_times_out() -> None:
    """The answer, the error, or neither."""
    never = threading.Event()
    assert in_time(LONG, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        in_time(LONG, lambda: 1 // 0)
    with pytest.raises(TimeoutError):
        in_time(0.01, never.wait)
    never.set()
