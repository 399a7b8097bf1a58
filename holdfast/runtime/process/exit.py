"""How a worker exits: after SIGTERM at the end of its step, after its gloo threads are idle, and without dismantling the interpreter.

Standard library only.
"""

from __future__ import annotations

import _io
import atexit
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

EXIT_STATUS: Final = 128 + signal.SIGTERM
"""A shell's exit status for this signal: the sender sees that it was handled."""
_GLOO: Final = "(pt_gloo_runloop) "
IDLE_CHECKS: Final = 3
"""Consecutive checks, a millisecond apart, that must find the threads idle."""
FINALIZER_SECONDS: Final = 30.0
"""How long the finalizers of what a failed script has left may take: one may wait for a device whose operations never end."""

_status: int | None = None
_is_prepared = False


class SigtermHandler:
    """Notices SIGTERM, so that the process finishes its step and all ranks can save together.

    A stopped job, the end of a time limit and the preemption notice of a spot instance all send it first.
    """

    def __init__(self) -> None:
        self.received = False
        """Whether this process is to exit."""

    def listen(self) -> None:
        """Handle the signal from now on, unless the script does, or this is not the main thread."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        """Take note. The signal may come again, from a batch system and from the agent, and must not interrupt a save."""
        self.received = True


def wait_until_idle(seconds: float = 1.0) -> bool:
    """Wait until gloo's threads have released their last operation, at most so many *seconds*; return whether they have.

    Call it when the process is about to exit. In torch 2.13 the thread that ran the last collective wakes the waiting rank first and frees
    the operation after that, for which it needs the interpreter. If the rank has exited by then, Python ends the thread where C++ forbids
    it ("terminate called without an active exception"), and completed training ends with SIGABRT.
    """
    deadline, idle = time.monotonic() + seconds, 0
    while idle < IDLE_CHECKS:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)  # such a thread can take the interpreter meanwhile
        idle = 0 if _any_gloo_thread_runs() else idle + 1
    return True


def _any_gloo_thread_runs() -> bool:
    """Return whether any of gloo's threads runs, or would if there were a processor for it."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has exited
            stat = (task / "stat").read_text()
            if _GLOO in stat and stat.partition(_GLOO)[2].startswith("R"):
                return True
    return False


# -- the quick exit -----------------------------------------------------------------------------------------------------


def prepare_quick_exit() -> None:
    """Exit quickly once `set_status` has been called. Call this before others register exit handlers: this one must run last.

    An interpreter that has imported torch needs seconds of a core to dismantle its modules. After a failure these are seconds in which
    other ranks try to recover on the same machine. And its process groups would wait there for peers and devices, or abort the process.
    """
    global _is_prepared  # noqa: PLW0603 (a process exits once)
    _is_prepared = True
    atexit.register(_exit)


def make_failure_certain() -> None:
    """Have this process exit with status 1 after an uncaught exception, once that is printed, whatever its process groups would do then.

    For a process that no launcher of Holdfast's has started, which would have prepared that. All exit handlers run as they would otherwise,
    and a script that ends in another way exits as it always does.
    """
    global _is_prepared  # noqa: PLW0603 (a process exits once)
    if _is_prepared:
        return
    _is_prepared = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(sys, "last_value", None) is error:  # the interpreter ends by it, and nobody just has it printed
            set_status(error)
            atexit.register(_exit_after_all_handlers)
        before(kind, error, trace)

    sys.excepthook = hook


def _exit_after_all_handlers() -> None:
    """Run the exit handlers that are left, and exit: what is registered last runs first, and nothing but the first registered runs last."""
    atexit.unregister(_exit_after_all_handlers)
    atexit._run_exitfuncs()  # noqa: SLF001 (there is no other call that runs them)
    _exit()


def set_status(error: BaseException | None) -> None:
    """Record how the script ended; after Ctrl-C the interpreter exits as it always does."""
    global _status  # noqa: PLW0603 (a process exits once)
    if isinstance(error, KeyboardInterrupt):
        return
    _status = 1 if error is not None else 0
    if isinstance(error, SystemExit):
        _status = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def _exit() -> None:
    """Release what the script has left, so that its finalizers run, and exit. Only daemon threads run by now."""
    if _status is None or threading.current_thread() is not threading.main_thread():
        return
    if _status:
        with suppress(OSError, ValueError):  # no standard error to write the stacks to
            # In a thread without the interpreter's lock, which a finalizer in C++ may hold. It exits with status 1.
            faulthandler.dump_traceback_later(FINALIZER_SECONDS, exit=True, file=2)
    if all(one is threading.main_thread() or one.name.startswith("holdfast") for one in threading.enumerate()):
        sys.modules["__main__"].__dict__.clear()  # a daemon thread of the script would fail over that
        gc.collect()
    outputs = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and not stream.closed]
    try:
        for stream in outputs:
            stream.flush()
    except (OSError, ValueError):
        return  # the interpreter reports that itself
    for one in gc.get_objects():
        if issubclass(type(one), _io._IOBase) and one not in outputs:  # noqa: SLF001 (the class of all files; `isinstance` makes proxies warn)
            with suppress(Exception):  # as its finalizer would
                one.close()
    os._exit(_status)
