"""Ask the kernel about the network device that a line of its log names, in a child process: an adapter's firmware may not answer."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.agent.monitor.nvml_events import ChildReaper
from holdfast.detectors.codec import BLIND, MalformedData, packed, unpacked
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.findings import FaultFinding
from holdfast.detectors.nodes.links import LineCheck, LinkReading, check_line
from holdfast.log import note
from holdfast.probe.readers.collect import run_in_children
from holdfast.probe.readers.links import read_links

log = logging.getLogger("holdfast.agent.monitor")

SETTLE: Final = 0.1
"""Seconds from a line to the reading: a driver may write the line first and tell the kernel then."""
LIMIT: Final = 0.5
"""Seconds after which a line is reported without a check: far less than the peers of a lost link need to fail."""
BEFORE: Final = 2.0
"""Seconds by which a reading must be older than a line to show the state before: a syslog daemon writes some time after the kernel."""
MAX_KEPT: Final = 4
MAX_AT_ONCE: Final = 8
"""Checks that may run: further lines are reported unchecked."""
NOTHING: Final = LineCheck()


@dataclass(slots=True)
class _Running:
    """A child that reads, and the line for which it does."""

    found: FaultFinding
    begun: float
    pid: int
    pipe: int
    done: Callable[[LineCheck], None]
    answer: bytearray = field(default_factory=bytearray)


class LinkChecks:
    """The checks that run, and the readings from before to compare with."""

    def __init__(self, children: ChildReaper, selector: selectors.BaseSelector, root: Path) -> None:
        self._children, self._selector, self._root = children, selector, root
        self._first: LinkReading | None = None
        self._readings: deque[tuple[float, LinkReading]] = deque(maxlen=MAX_KEPT)
        self._running: dict[tuple[str, str], _Running] = {}

    def read_all(self, seconds: float) -> dict[str, Any]:
        """Return all links as JSON values within *seconds*, and when they were read; for a process without threads."""
        at = time.monotonic()
        return {"at": at, **run_in_children({"links": partial(read_links, self._root)}, at + seconds, "no answer in time")}

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Keep what `read_all` returned to compare with; raise `MalformedData` if it is no such thing."""
        if BLIND in answer["links"]:
            return
        reading, at = unpacked(LinkReading, answer["links"]), float(answer["at"])
        if self._first is None:
            self._first = reading
            note(log, "links.read", links="unknown" if isinstance(reading.links, Unknown) else len(reading.links), host=reading.is_host)
        self._readings.append((at, reading))

    def runs(self, found: FaultFinding) -> bool:
        """Return whether a line of the same kind about the same part is being checked."""
        return (found.kind, found.part) in self._running

    def begin(self, found: FaultFinding, done: Callable[[LineCheck], None]) -> None:
        """Check a line; call *done* with the result, an empty one where there is none in time."""
        if len(self._running) >= MAX_AT_ONCE:
            done(NOTHING)
            return
        ours, its = os.pipe()
        pid = self._children.fork(its)
        if pid == 0:
            try:
                time.sleep(SETTLE)
                answer = json.dumps(packed(read_links(self._root))).encode()
                while answer:
                    answer = answer[os.write(its, answer) :]
            finally:
                os._exit(0)
        os.close(its)
        one = _Running(found, time.monotonic(), pid, ours, done)
        self._running[found.kind, found.part] = one
        self._selector.register(ours, selectors.EVENT_READ, lambda _mask: self._read(one))

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        return min((one.begun + LIMIT for one in self._running.values()), default=None)

    def tick(self, now: float) -> None:
        """Give up checks that take too long."""
        for one in [one for one in self._running.values() if now >= one.begun + LIMIT]:
            os.kill(one.pid, signal.SIGKILL)
            self._end(one, NOTHING)

    def _read(self, one: _Running) -> None:
        data = os.read(one.pipe, 1 << 18)
        one.answer += data
        if not data:
            self._end(one, self._judged(one))

    def _judged(self, one: _Running) -> LineCheck:
        try:
            now = unpacked(LinkReading, json.loads(bytes(one.answer)))
        except (ValueError, MalformedData):  # its reader failed
            return NOTHING
        older = [(at, reading) for at, reading in self._readings if at <= one.begun - BEFORE]
        earlier = [self._first, older[-1][1]] if self._first is not None and older else []
        seconds = time.monotonic() - older[-1][0] if older else 0.0
        return check_line(one.found.kind, one.found.quote, earlier, now, seconds)

    def _end(self, one: _Running, check: LineCheck) -> None:
        self._selector.unregister(one.pipe)
        os.close(one.pipe)
        self._children.status(one.pid)  # its exit status says nothing; it is reaped when it ends
        del self._running[one.found.kind, one.found.part]
        one.done(check)
