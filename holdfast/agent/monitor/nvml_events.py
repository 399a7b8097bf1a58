"""GPU errors as the driver reports them, read by a process of its own: a hanging driver blocks nothing else."""

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

from holdfast.detectors.codec import packed
from holdfast.detectors.evidence import Unknown
from holdfast.host.process import die_with_parent
from holdfast.log import note
from holdfast.probe.readers.nvml import NoNvml, listening
from holdfast.protocol import Message

log = logging.getLogger("holdfast.agent.monitor")

RETRY_SECONDS: Final = 60.0
"""Seconds until the next attempt where there is no driver: it may be loaded, or come back, while a job runs."""
WAIT_SECONDS: Final = 600.0
"""Seconds of one wait for an event; each ends at once when there is one."""
PAUSE: Final = 0.5
"""Seconds before an exited listener is restarted; twice as long each time, up to `RETRY_SECONDS`."""
STEADY: Final = 60.0
"""Seconds that a listener must have lived to count as restored."""
MAX_DOUBLINGS: Final = 10
NAME: Final = "monitor-nvml"
"""Of the process, as `ps` shows it."""
MAX_DESCRIPTORS: Final = 256
"""The monitor has a dozen open."""


class ChildReaper:
    """The monitor's child processes, reaped when they end, or a sample would report them as zombies. One per process: it takes SIGCHLD."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())

    def fork(self, keep: int) -> int:
        """Fork; return the child's pid, and in the child 0 with nothing open but *keep* and the standard descriptors."""
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.closerange(3, keep)  # a socket that the child held open would never close
            os.closerange(keep + 1, MAX_DESCRIPTORS)
        else:
            self._ended.pop(pid, None)  # of an earlier child with this number, whose status was never read
            self._running.add(pid)
            self._reap()  # it may have ended before it was added
        return pid

    def status(self, pid: int) -> int | None:
        """Return and forget the exit status of a child (negative: the signal); None while it runs."""
        self._reap()
        return self._ended.pop(pid, None)

    def _reap(self) -> None:
        for pid in tuple(self._running):
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                self._ended[pid] = os.waitstatus_to_exitcode(status)
            self._running.discard(pid)


class NvmlListener:
    """Runs the listening process, and restarts it when it exits: a driver's crash or a lack of memory may kill it."""

    def __init__(
        self, children: ChildReaper, selector: selectors.BaseSelector, received: Callable[[Message], None], send: Callable[[Message], None]
    ) -> None:
        """Call *received* with each of its messages, and *send* when it is lost and when it is restored."""
        self._children, self._selector, self._received, self._send = children, selector, received, send
        self._pid, self._since, self._exits = 0, 0.0, 0
        self._restart_at: float | None = None
        self._unread = bytearray()

    def begin(self) -> None:
        """Start it; raise ``OSError`` when it cannot start."""
        self._pid, pipe = start_listening(self._children)
        self._since, self._unread = time.monotonic(), bytearray()
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, lambda _mask: self._read(pipe))

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return self._restart_at if self._restart_at is not None else self._since + STEADY if self._exits else None

    def tick(self, now: float) -> None:
        """Restart it when that is due; report when it has lived for a while."""
        if self._restart_at is not None and now >= self._restart_at:
            self._restart(now)
        elif self._restart_at is None and self._exits and now >= self._since + STEADY:
            self._exits = 0
            note(log, "gpu-events.restored")
            self._send({"gpu_events_restored": True})

    def _restart(self, now: float) -> None:
        status = self._children.status(self._pid)
        if status is None:
            how = "hangs in the driver"
        else:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if self._exits == 1:
            note(log, "gpu-events.lost", how=how)
            self._send({"gpu_events_lost": f"the process that reads GPU driver events {how}"})
        try:
            self.begin()
        except OSError as error:  # no room for a process now
            self._restart_at = now + RETRY_SECONDS
            note(log, "gpu-events.not-restarted", why=error)
        else:
            self._restart_at = None

    def _read(self, pipe: int) -> None:
        data = os.read(pipe, 1 << 16)
        if not data:
            self._selector.unregister(pipe)
            os.close(pipe)
            self._exits += 1
            self._restart_at = time.monotonic() + min(RETRY_SECONDS, PAUSE * 2 ** min(self._exits - 1, MAX_DOUBLINGS))
            return
        self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._received(json.loads(line))


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
    """Send each Xid, and why none can be read; a reason is not repeated."""

    def send(message: dict[str, object]) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    reported = ""
    while True:
        try:
            with listening() as watch:
                reported = ""
                for blind in watch.unwatched.values():
                    send({"blind": blind.why})
                while not isinstance(found := watch.wait(WAIT_SECONDS), Unknown):
                    if found is not None:
                        send({"xid": packed(found), "at": time.time()})
                send({"blind": found.why})
        except NoNvml as error:
            if error.why != reported:
                reported = error.why
                send({"blind": reported})
        time.sleep(RETRY_SECONDS)
