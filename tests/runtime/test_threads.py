"""A worker whose training is done ends with 0, whatever gloo's threads are still at."""

from __future__ import annotations

import ctypes
import threading

from holdfast.runtime.process.gloo_threads import wait_until_idle
from tests.runtime.ranks import Ranks


def test_a_process_waits_for_gloo_threads_at_work() -> None:
    """A thread that bears gloo's name is waited for while it runs, with a limit, and not longer."""
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


def test_threads_at_rest_hold_nothing_up(ranks: Ranks) -> None:
    """Real gloo threads after their last collective come to rest."""
    assert ranks.run("come_to_rest", 2) == [True, True]
