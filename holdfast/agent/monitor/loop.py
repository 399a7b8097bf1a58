"""The lookout's loop: lines of the kernel's log, errors of GPUs, changes of links and looks at the node, each as it comes."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Final

from detectors.codec import MalformedData, unpacked
from detectors.counter_deltas import grown_errors
from detectors.evidence import NOT_REQUESTED
from detectors.gpu_readings import Xid
from detectors.health import fault_findings
from detectors.kernel_lines import finding_of
from detectors.readings import KernelLine, NodeReading
from detectors.xids import finding
from holdfast.agent.monitor.child_reaper import ChildReaper
from holdfast.agent.monitor.deduplicator import Deduplicator, EventBudget
from holdfast.agent.monitor.kernel_log import KernelLogFollower
from holdfast.agent.monitor.netlink import drain, hear_links
from holdfast.agent.monitor.nvml_events import NvmlListener
from holdfast.log import note
from holdfast.probe.readers.collect import look
from holdfast.protocol import LineBuffer, Message, encode

log = logging.getLogger("holdfast.agent.monitor")

EVERY: Final = 60.0
"""Seconds between two looks: what counters alone tell is slow to grow, and a look costs some 0.2 s of a processor."""
SOON: Final = 0.5
"""Seconds from something that happened to a look at what came of it: one thing seldom happens alone."""
APART: Final = 5.0
"""Seconds between two looks at least."""
LOOK_SECONDS: Final = 10.0
"""Seconds that one look may take."""
TOO_LONG: Final = 40.0
"""Seconds after which a look that did not even say what it could not see is given up."""


class MonitorLoop:
    """Everything that the lookout waits for. One thread, so that it may fork."""

    def __init__(self, agent: socket.socket, node: str, kernel_log: Path, root: Path) -> None:
        self._agent, self._node, self._root = agent, node, root
        self._lines = LineBuffer()
        self._telling, self._budget = Deduplicator(node, self._say), EventBudget()
        self._selector = selectors.DefaultSelector()
        self._before: NodeReading | None = None
        self._baseline: NodeReading | None = None
        self._ended: tuple[int, NodeReading | None] | None = None
        """Generation in which something ended and the look from before it: the difference is to be told with the next look."""
        self._looking: tuple[int, int, bytearray] | None = None
        """The process that looks now: its pid, its pipe, and what it has said."""
        self._children = ChildReaper()
        self._listener = NvmlListener(self._children, self._selector, self._xid, self._say)
        self._next_look = self._last_look = time.monotonic()
        self._kernel = KernelLogFollower(kernel_log)
        self._links = hear_links()

    def run(self) -> None:
        """Watch until the agent goes."""
        self._listener.begin()
        self._kernel.tell(self._line)
        self._kernel.register(self._selector)
        self._selector.register(self._agent, selectors.EVENT_READ, lambda _mask: self._hear())
        if self._links is not None:
            self._selector.register(self._links, selectors.EVENT_READ, lambda _mask: self._link())
        while True:
            for key, mask in self._selector.select(self._patience()):
                key.data(mask)
            self._tick()

    def _patience(self) -> float:
        times = [self._kernel.due(), self._listener.due(), self._next_look if self._looking is None else self._last_look + TOO_LONG]
        return max(0.0, min(at for at in times if at is not None) - time.monotonic())

    def _tick(self) -> None:
        now = time.monotonic()
        self._kernel.tick(now)
        self._listener.tick(now)
        if self._looking is None and now >= self._next_look:
            self._start_look(now)
        elif self._looking is not None and now >= self._last_look + TOO_LONG:
            self._give_up_look()

    def _say(self, message: Message) -> None:
        self._agent.sendall(encode(message))

    # -- what the agent says --------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        data = self._agent.recv(1 << 16)
        if not data:
            raise EOFError
        for message in self._lines.feed(data):
            if "generation" in message:
                self._baseline = self._before
            if "ended" in message:
                self._ended = self._ended or (int(message["ended"]), self._baseline)
                self._soon()

    def _soon(self) -> None:
        """Look in a moment."""
        self._next_look = min(self._next_look, max(time.monotonic() + SOON, self._last_look + APART))

    # -- what happens ---------------------------------------------------------------------------------------------------

    def _line(self, line: KernelLine) -> None:
        """Judge a line of the kernel's log."""
        at, now = time.time(), time.monotonic()
        if not self._budget.allows(now):
            if self._budget.passed_over == 1:
                note(log, "kernel-log.flooded")
            return
        seen = finding_of(line)
        if seen is not None and self._telling.happened(seen, "kernel log", at, now):
            self._soon()

    def _xid(self, message: Message) -> None:
        """Take in what the listener says of GPUs."""
        if "deaf" in message:
            note(log, "listener.deaf", why=message["deaf"])
            return
        seen = finding(unpacked(Xid, message["xid"]))
        if seen is not None and self._telling.happened(seen, "GPU driver events", message["at"], time.monotonic()):
            self._soon()

    def _link(self) -> None:
        assert self._links is not None
        if drain(self._links):
            self._soon()

    # -- looking --------------------------------------------------------------------------------------------------------

    def _start_look(self, now: float) -> None:
        """Have a process look at the node: it may hang, which we may not."""
        ours, its = os.pipe()
        pid = self._children.fork(its)
        if pid == 0:
            try:
                os.nice(15)  # it can wait for a processor that nobody else wants
                answer = json.dumps(look(self._node, self._root, LOOK_SECONDS)).encode()
                while answer:
                    answer = answer[os.write(its, answer) :]
            finally:
                os._exit(0)
        os.close(its)
        self._looking = pid, ours, bytearray()
        self._last_look, self._next_look = now, now + EVERY
        self._selector.register(ours, selectors.EVENT_READ, lambda _mask: self._seen())

    def _seen(self) -> None:
        assert self._looking is not None
        _, pipe, told = self._looking
        data = os.read(pipe, 1 << 18)
        told += data
        if data:
            return
        self._end_look()
        try:
            reading = unpacked(
                NodeReading, json.loads(bytes(told)) | {"kernel": {"blind": NOT_REQUESTED.why}}
            )  # its log is followed already
        except (ValueError, MalformedData) as error:
            note(log, "look.failed", why=error)
            return
        self._compare(reading)

    def _end_look(self) -> None:
        assert self._looking is not None
        pid, pipe, _ = self._looking
        self._selector.unregister(pipe)
        os.close(pipe)
        self._children.status(pid)  # how it ended says nothing; it is reaped when it does
        self._looking = None

    def _give_up_look(self) -> None:
        assert self._looking is not None
        os.kill(self._looking[0], signal.SIGKILL)
        self._end_look()
        note(log, "look.gave-no-answer", seconds=TOO_LONG)

    def _compare(self, now: NodeReading) -> None:
        before, self._before = self._before, now
        if self._baseline is None:
            self._baseline = now
        self._telling.looked(fault_findings(now, before), now.at, time.monotonic())
        if self._ended is not None:
            (generation, since), self._ended = self._ended, None
            if since is not None:
                self._say({"counter_increases": grown_errors(since, now), "generation": generation, "seconds": now.at - since.at})
