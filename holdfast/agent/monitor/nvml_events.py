"""Errors of GPUs as their driver tells them, from a process of its own: a driver that hangs takes nobody with it."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from detectors.codec import packed
from detectors.evidence import Unknown
from holdfast.agent.monitor.child_reaper import ChildReaper
from holdfast.log import note
from holdfast.probe.readers.nvml import NoNvml, XidWatch, listening
from holdfast.process import die_with_parent
from holdfast.protocol import Message

log = logging.getLogger("holdfast.agent.monitor")

AGAIN: Final = 60.0
"""Seconds until it is tried again where there is nothing to listen to: a driver may be loaded, or come back, while a job runs."""
WAIT: Final = 600.0
"""Seconds of one wait for an event; each ends at once when there is one."""
PAUSE: Final = 0.5
"""Seconds before a listener that died is followed by another; twice as long each time, up to `AGAIN`."""
STEADY: Final = 60.0
"""Seconds that one must have lived for the trouble to be over."""
DOUBLINGS: Final = 10
NAME: Final = "lookout-nvml"
"""Of the process, as `ps` shows it."""


class NvmlListener:
    """The process that listens, and another one whenever it has died: a driver that crashes, or whoever is short of memory, may kill it."""

    def __init__(
        self, children: ChildReaper, selector: selectors.BaseSelector, heard: Callable[[Message], None], tell: Callable[[Message], None]
    ) -> None:
        """Have *heard* called with each thing heard, and *tell* with begin and end of a time in which nobody listens for sure."""
        self._children, self._selector, self._heard, self._tell = children, selector, heard, tell
        self._pid, self._since, self._deaths = 0, 0.0, 0
        self._again_at: float | None = None
        self._said = bytearray()

    def begin(self) -> None:
        """Start it; raise ``OSError`` when that cannot be."""
        self._pid, pipe = start_listening(self._children)
        self._since, self._said = time.monotonic(), bytearray()
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, lambda _mask: self._read(pipe))

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return self._again_at if self._again_at is not None else self._since + STEADY if self._deaths else None

    def tick(self, now: float) -> None:
        """Start another one when it is time; say so when it has lived for a while."""
        if self._again_at is not None and now >= self._again_at:
            self._start_again(now)
        elif self._again_at is None and self._deaths and now >= self._since + STEADY:
            self._deaths = 0
            note(log, "listener.back")
            self._tell({"hears": True})

    def _start_again(self, now: float) -> None:
        how = _how_it_ended(self._children.status(self._pid))
        if self._deaths == 1:
            note(log, "listener.gone", how=how)
            self._tell({"deaf": f"the process that listens to it {how}"})
        try:
            self.begin()
        except OSError as error:  # no room for a process now
            self._again_at = now + AGAIN
            note(log, "listener.not-started", why=error)
        else:
            self._again_at = None

    def _read(self, pipe: int) -> None:
        data = os.read(pipe, 1 << 16)
        if not data:
            self._selector.unregister(pipe)
            os.close(pipe)
            self._deaths += 1
            self._again_at = time.monotonic() + min(AGAIN, PAUSE * 2 ** min(self._deaths - 1, DOUBLINGS))
            return
        self._said += data
        *whole, self._said = self._said.split(b"\n")
        for line in whole:
            self._heard(json.loads(line))


def _how_it_ended(code: int | None) -> str:
    """Say how a process ended that has closed its pipe; one that the driver holds has no exit status yet."""
    if code is None:
        return "hangs in the driver"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def start_listening(children: ChildReaper) -> tuple[int, int]:
    """Start the process; return its pid and the end of a pipe that gives a line of JSON for each Xid."""
    ours, its = os.pipe()
    parent = os.getpid()
    pid = children.fork(its)
    if pid == 0:
        try:
            die_with_parent(parent)
            with suppress(OSError):
                Path("/proc/self/comm").write_text(NAME)
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
                for blind in watch.unwatched.values():
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
        if isinstance(found, Unknown):
            _say(pipe, {"deaf": found.why})
            return
        if found is not None:
            _say(pipe, {"xid": packed(found), "at": time.time()})


def _say(pipe: int, message: dict[str, object]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")
