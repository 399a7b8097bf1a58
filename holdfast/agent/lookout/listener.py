"""Errors of GPUs as their driver tells them, from a process of its own: a driver that hangs takes nobody with it."""

from __future__ import annotations

import json
import os
import time
from typing import Final

from detectors.evidence import Blind
from detectors.portable import packed
from holdfast.process import die_with_parent
from holdfast.readers.nvml import NoNvml
from holdfast.readers.xids import XidWatch, listening

AGAIN: Final = 60.0
"""Seconds until it is tried again where there is nothing to listen to: a driver may be loaded, or come back, while a job runs."""
WAIT: Final = 600.0
"""Seconds of one wait for an event; each ends at once when there is one."""
DESCRIPTORS: Final = 256
"""The lookout has a dozen open."""


def only(descriptor: int) -> None:
    """Leave this process, a fork, nothing open but *descriptor* and the standard ones: a socket that it held would never end."""
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, DESCRIPTORS)


def start_listening() -> tuple[int, int]:
    """Start the process; return its pid and the end of a pipe that gives a line of JSON for each Xid."""
    ours, its = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            only(its)
            die_with_parent(parent)
            _listen(its)
        finally:
            os._exit(0)
    os.close(its)
    return pid, ours


def _listen(pipe: int) -> None:
    said = ""
    while True:
        try:
            with listening() as watch:
                said = ""
                for blind in watch.deaf.values():
                    _say(pipe, {"deaf": blind.why})
                _hear(pipe, watch)
        except NoNvml as error:
            if error.why != said:
                said = error.why
                _say(pipe, {"deaf": said})
        time.sleep(AGAIN)


def _hear(pipe: int, watch: XidWatch) -> None:
    """Tell each Xid until NVML can no longer wait for one."""
    while True:
        found = watch.wait(WAIT)
        if isinstance(found, Blind):
            _say(pipe, {"deaf": found.why})
            return
        if found is not None:
            _say(pipe, {"xid": packed(found), "at": time.time()})


def _say(pipe: int, message: dict[str, object]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")
