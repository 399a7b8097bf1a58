"""What SIGTERM to a controller's process means: stop the job in order, or detach from it.

Prefect turns the signal into an exception, wherever the flow is: a task run would show as crashed where a person only cancelled. So the
first signal is taken as a request, which the controller answers when it looks next (ten times a second while it monitors). It is raised
after all when nobody looks in time; a second one always is.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from holdfast.control.supervisor.detach import machine_goes_down, termination_lets_go
from policies.states import Event

if TYPE_CHECKING:
    from holdfast.control.supervisor.controller import JobController

ANSWER_SECONDS: Final = 5.0
"""How long the controller may be busy with something else; a Prefect worker ends a process 30 s after its SIGTERM."""
POLL_SECONDS: Final = 1.0
"""How long to wait for Prefect to say that the signal is a cancellation."""
SIGTERM: Final = "the process of its controller received SIGTERM"


@contextmanager
def heeding_termination(run: JobController) -> Iterator[None]:
    """Take the first SIGTERM as a request while the block runs; in the main thread of a program that handles it, which Prefect's does."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def insist() -> None:
        if run.terminated_at is not None and run.live:
            os.kill(os.getpid(), signal.SIGTERM)

    def heed(*_: object) -> None:
        signal.signal(signal.SIGTERM, before)
        run.terminated_at = time.monotonic()
        run.flow_run.poll.set()
        timer = threading.Timer(ANSWER_SECONDS, insist)
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, heed)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is heed:
            signal.signal(signal.SIGTERM, before)


def answer(run: JobController) -> None:
    """Take a SIGTERM that was heeded for the wish to stop the job, unless it means to detach from it."""
    if run.terminated_at is None:
        return
    if run.flow_run.id and not run.flow_run.cancelled and time.monotonic() - run.terminated_at < POLL_SECONDS:
        return
    run.terminated_at = None
    if why := _why_to_detach(run, SIGTERM):
        run.detach.ask(why)
    else:
        run.requests.stop(run.flow_run.cancelled or SIGTERM)


def end_at_once(run: JobController, raised: BaseException) -> None:
    """Answer a signal that was raised as an exception, which has left the flow: there is no next look."""
    how = "the process of its controller was interrupted (Ctrl-C)" if isinstance(raised, KeyboardInterrupt) else SIGTERM
    if run.released:
        return
    if why := _why_to_detach(run, how):
        run.detach.ask(why)
    else:
        run.move(Event.STOP_ASKED, run.flow_run.cancelled or how)


def _why_to_detach(run: JobController, how: str) -> str:
    """Return why whoever ended the process did not mean the job: the setting says so, or the machine goes down and holds no part of it."""
    if termination_lets_go():
        return how
    return "the machine of the flow goes down" if run.agents.source.remote and machine_goes_down() else ""


@contextmanager
def undisturbed(run: JobController) -> Iterator[None]:
    """Let the SIGTERM that a Prefect worker sends for a cancellation pass while the job ends because of it: it would cut the saving short.

    Only the first one, and only where the cancellation was seen in Prefect before any signal: a second one, or one of somebody else, means
    it.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not run.flow_run.cancelled or threading.current_thread() is not threading.main_thread():
        yield
        return

    def let_pass(*_: object) -> None:
        signal.signal(signal.SIGTERM, before)

    signal.signal(signal.SIGTERM, let_pass)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
