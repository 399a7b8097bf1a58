"""Leave a job without ending it: because of SIGUSR1, of a request in the history, or because this machine shuts down.

The same file knows what SIGTERM to a controller's process means, stop the job or detach from it. Prefect turns the signal into an
exception, wherever the flow is: a task run would show as crashed where a person only cancelled. So the first SIGTERM is taken as a
request, which the controller answers when it polls next (ten times a second while it monitors). It is raised after all when the
controller does not poll in time; a second one always is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.errors import BadSetting
from holdfast.policies.states import Event

if TYPE_CHECKING:
    from holdfast.control.supervisor.controller import JobController

SIGNAL: Final = signal.SIGUSR1
SETTING: Final = "HOLDFAST_SIGTERM"
"""What SIGTERM to a controller means: `STOP`, or `DETACH` where its sender, such as a batch system, ends the process and not the job."""
STOP: Final = "stop"
DETACH: Final = "detach"
SYSTEMCTL_SECONDS: Final = 2.0
"""How long systemd may take to answer whether it stops: a controller that has to end has few seconds itself."""
SYSTEMD_SHUTDOWN: Final = "systemd-shutdow"
"""Name of process 1 once systemd has stopped all units (the kernel keeps 15 letters)."""
ANSWER_SECONDS: Final = 5.0
"""How long the controller may be busy when a SIGTERM comes; a Prefect worker kills a process 30 s after its SIGTERM."""
POLL_SECONDS: Final = 1.0
"""How long to wait for Prefect to report that the signal is a cancellation."""
SIGTERM: Final = "the process of its controller received SIGTERM"
INTERRUPTED: Final = "the process of its controller was interrupted (Ctrl-C)"


class Detach:
    """Whether a controller is to leave its job, and why."""

    def __init__(self) -> None:
        self._requested = ""
        self.is_possible: Callable[[], bool] = lambda: True
        """Whether the next controller can continue where the job is now; a request waits until it can."""

    @property
    def why(self) -> str:
        """Return why the controller is to leave the job now; empty if it is not."""
        return self._requested if self._requested and self.is_possible() else ""

    def request(self, why: str) -> None:
        """Have the controller leave the job when it polls next; the first reason counts."""
        self._requested = self._requested or why

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Have a request wait while the block runs, as for a controller that has begun to take a job."""
        possible, self.is_possible = self.is_possible, lambda: False
        try:
            yield
        finally:
            self.is_possible = possible

    def on_signal(self, *_: object) -> None:
        """Take the signal as the request."""
        self.request("it received SIGUSR1")


# -- SIGUSR1 ------------------------------------------------------------------------------------------------------------


def handle_sigusr1() -> Detach:
    """Take SIGUSR1 as the request to detach until this program ends, also one that was blocked until now; return what records it."""
    detach = Detach()
    signal.signal(SIGNAL, detach.on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    return detach


def present() -> Detach:
    """Return what handles SIGUSR1 in this process, or a new one that does not yet."""
    known = getattr(signal.getsignal(SIGNAL), "__self__", None)
    return known if isinstance(known, Detach) else Detach()


@contextmanager
def sigusr1_blocked() -> Iterator[None]:
    """Keep SIGUSR1 pending for a program that is started, or replaces this one, in the block, until it calls `handle_sigusr1`.

    Handlers do not survive exec, and a signal that nobody handles ends a process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def sigusr1_handled() -> Iterator[Detach]:
    """Take SIGUSR1 as the request to detach while the block runs; outside the main thread, which alone gets signals, it has no effect."""
    sigterm_detaches()  # a wrong setting is refused before anything begins
    if threading.current_thread() is not threading.main_thread():
        yield Detach()
        return
    detach = present()
    before = signal.signal(SIGNAL, detach.on_signal)
    try:
        yield detach
    finally:
        signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)


# -- SIGTERM ------------------------------------------------------------------------------------------------------------


@contextmanager
def sigterm_as_request(run: JobController) -> Iterator[None]:
    """Take the first SIGTERM as a request while the block runs; in the main thread of a program that handles it, as Prefect's does."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def insist() -> None:
        if run.terminated_at is not None and run.live:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_sigterm(*_: object) -> None:
        signal.signal(signal.SIGTERM, before)
        run.terminated_at = time.monotonic()
        run.flow_run.poll.set()
        timer = threading.Timer(ANSWER_SECONDS, insist)
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is on_sigterm:
            signal.signal(signal.SIGTERM, before)


def answer_sigterm(run: JobController) -> None:
    """Stop the job, or detach from it, because of a SIGTERM that was taken as a request."""
    if run.terminated_at is None:
        return
    if run.flow_run.id and not run.flow_run.cancelled and time.monotonic() - run.terminated_at < POLL_SECONDS:
        return
    run.terminated_at = None
    if why := _why_to_detach(run, SIGTERM):
        run.detach.request(why)
    else:
        run.requests.stop(run.flow_run.cancelled or SIGTERM)


def end_at_once(run: JobController, raised: BaseException) -> None:
    """Answer a signal that was raised as an exception and has left the flow: there is no next poll."""
    how = INTERRUPTED if isinstance(raised, KeyboardInterrupt) else SIGTERM
    if run.released:
        return
    if why := _why_to_detach(run, how):
        run.detach.request(why)
    else:
        run.move(Event.STOP_ASKED, run.flow_run.cancelled or how)


def _why_to_detach(run: JobController, how: str) -> str:
    """Return why the sender of the signal did not mean the job: by the setting, or as the machine, which has no part of it, shuts down."""
    if sigterm_detaches():
        return how
    return "the machine of the controller shuts down" if run.agents.source.remote and machine_shuts_down() else ""


@contextmanager
def first_sigterm_ignored(run: JobController) -> Iterator[None]:
    """Ignore the SIGTERM that a Prefect worker sends for a cancellation while the job ends because of it: it would cut the saving short.

    Only the first one, and only where the cancellation was seen in Prefect before any signal: a second one, or one of another sender, is
    meant.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not run.flow_run.cancelled or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, before))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def sigterm_detaches() -> bool:
    """Return whether SIGTERM means to detach from the job; raise `BadSetting` for an unknown value of the setting."""
    setting = os.environ.get(SETTING) or STOP
    if setting not in {STOP, DETACH}:
        raise BadSetting(SETTING, setting, (STOP, DETACH))
    return setting == DETACH


def machine_shuts_down(first: Path = Path("/proc/1/comm")) -> bool:
    """Return whether systemd is shutting this machine down; False where there is no systemd."""
    with suppress(OSError):
        if first.read_text(encoding="utf-8").strip() == SYSTEMD_SHUTDOWN:
            return True
    program = shutil.which("systemctl")
    if program is None:
        return False
    try:
        done = subprocess.run([program, "is-system-running"], capture_output=True, text=True, timeout=SYSTEMCTL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "stopping"


# -- jobs that this process left ----------------------------------------------------------------------------------------

_DETACHED: dict[str, bool] = {}
"""Job that this process controlled to whether it was detached; in the history such a job looks like one whose controller died."""


def note_left(job: str, *, detached: bool) -> None:
    """Note that this process controls *job* no more."""
    _DETACHED[job] = detached


def note_taken(job: str) -> None:
    """Note that this process controls *job*, perhaps again."""
    _DETACHED.pop(job, None)


def has_left(job: str) -> bool:
    """Return whether this process controlled *job* once and does no more."""
    return job in _DETACHED


def was_detached(job: str) -> bool:
    """Return whether this process detached from *job*, which goes on."""
    return _DETACHED.get(job, False)
