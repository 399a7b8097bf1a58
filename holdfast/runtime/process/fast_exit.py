"""The quick way out of a worker: all that a script can see of its end happens, and then the process is gone.

An interpreter that has imported torch takes seconds of a core to take its modules apart. Of a worker that failed these are seconds in
which others try to recover on that very machine.
"""

from __future__ import annotations

import _io
import atexit
import gc
import os
import sys
import threading
from contextlib import suppress

_status: int | None = None


def prepare() -> None:
    """Have the process leave quickly once `note` has been called. Before anything else registers exit handlers: this is to be the last."""
    atexit.register(_leave)


def note(error: BaseException | None) -> None:
    """Note with what the script ended; after a Ctrl-C the interpreter ends as it always does."""
    global _status  # noqa: PLW0603 (a process ends once)
    if isinstance(error, KeyboardInterrupt):
        return
    _status = 1 if error is not None else 0
    if isinstance(error, SystemExit):
        _status = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def _leave() -> None:
    """Let go of what the script has left, so that its finalizers run, and be gone. Only daemon threads run by now."""
    if _status is None or threading.current_thread() is not threading.main_thread():
        return
    if all(one is threading.main_thread() or one.name.startswith("holdfast") for one in threading.enumerate()):
        sys.modules["__main__"].__dict__.clear()  # a daemon of the script's would stumble over that
        gc.collect()
    outputs = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and not stream.closed]
    try:
        for stream in outputs:
            stream.flush()
    except (OSError, ValueError):
        return  # the interpreter has its way of telling that
    for one in gc.get_objects():
        if issubclass(type(one), _io._IOBase) and one not in outputs:  # noqa: SLF001 (the class of all files; `isinstance` has proxies warn)
            with suppress(Exception):  # as its finalizer would
                one.close()
    os._exit(_status)
