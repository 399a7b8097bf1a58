"""Let go of a job without ending it: its flow is told by SIGUSR1, by a request in the history, or because this machine goes down."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.errors import BadSetting

SIGNAL: Final = signal.SIGUSR1
SETTING: Final = "HOLDFAST_SIGTERM"
"""What SIGTERM to a flow means: `STOP`, or `HAND_OVER` where whoever sends it, such as a batch system, ends the process and not the job."""
STOP: Final = "stop"
HAND_OVER: Final = "hand-over"
SECONDS: Final = 2.0
"""How long systemd may take to say whether it stops: a flow that is told to end has few seconds itself."""
LAST: Final = "systemd-shutdow"
"""What the first process is called once systemd has ended all units and ends what is left (the kernel keeps 15 letters)."""


class Detach:
    """Whether this flow is to let go of its job, and why."""

    def __init__(self) -> None:
        self.why = ""

    def ask(self, why: str) -> None:
        """Have the flow let go as soon as it looks; the first reason counts."""
        self.why = self.why or why

    def hear(self, *_: object) -> None:
        """Take the signal for the order."""
        self.ask("it was told to by SIGUSR1")


def heed_from_now_on() -> Detach:
    """Take SIGUSR1 for the order to let go until this program ends, also where it was held back until now; what steers goes by it too."""
    handover = Detach()
    signal.signal(SIGNAL, handover.hear)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    return handover


def present() -> Detach:
    """Return what hears SIGUSR1 in this process, or a new one that does not yet."""
    known = getattr(signal.getsignal(SIGNAL), "__self__", None)
    return known if isinstance(known, Detach) else Detach()


@contextmanager
def held_back() -> Iterator[None]:
    """Keep SIGUSR1 for a program that is started or becomes of this one in the block, until that calls `heed_from_now_on`.

    Handlers do not outlive exec, and what nobody handles ends a process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def heeding_the_signal() -> Iterator[Detach]:
    """Take SIGUSR1 for the order to let go while the block runs; beside the main thread, which alone hears signals, only requests count."""
    termination_lets_go()
    if threading.current_thread() is not threading.main_thread():
        yield Detach()
        return
    handover = present()
    before = signal.signal(SIGNAL, handover.hear)
    try:
        yield handover
    finally:
        signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)


def termination_lets_go() -> bool:
    """Tell whether SIGTERM means to let go of the job; raise `BadSetting` where nobody knows."""
    said = os.environ.get(SETTING) or STOP
    if said not in {STOP, HAND_OVER}:
        raise BadSetting(SETTING, said, (STOP, HAND_OVER))
    return said == HAND_OVER


def machine_goes_down(first: Path = Path("/proc/1/comm")) -> bool:
    """Tell whether systemd is taking this machine down; where there is no systemd nobody knows."""
    with suppress(OSError):
        if first.read_text(encoding="utf-8").strip() == LAST:
            return True
    program = shutil.which("systemctl")
    if program is None:
        return False
    try:
        done = subprocess.run([program, "is-system-running"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "stopping"
