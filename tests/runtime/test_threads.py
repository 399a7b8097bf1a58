"""A worker whose training is complete exits with 0, whatever gloo's threads still do."""

from __future__ import annotations

import ctypes
import threading

from holdfast.runtime.process.exit import wait_until_idle
from tests.runtime.ranks import Ranks


def test_a_process_waits_for_running_gloo_threads() -> None:
    """A thread with gloo's name is waited for while it runs, with a limit, and not longer."""
    named, done = threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
        named.set()
        while not done.is_set():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    named.wait()
    assert wait_until_idle(seconds=0.05) is False
    done.set()
    thread.join()
    assert wait_until_idle() is True


def test_idle_threads_cause_no_delay(ranks: Ranks) -> None:
    """Real gloo threads become idle after their last collective."""
    assert ranks.run("come_to_rest", 2) == [True, True]
