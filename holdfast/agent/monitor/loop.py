"""The node monitor's loop: lines of the kernel's log, GPU errors, link changes and samples of the node, each as it comes."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from holdfast.agent.monitor.kernel_log import KernelLogFollower
from holdfast.agent.monitor.line_checks import LIMIT, LineChecks
from holdfast.agent.monitor.node_conditions import ConditionWatch, certainty_of
from holdfast.agent.monitor.nvml_events import ChildReaper, NvmlListener
from holdfast.detectors.catalogue import DRIVER_EVENTS, KERNEL_LOG, NODE_CONDITIONS, Certainty
from holdfast.detectors.codec import MalformedData, unpacked
from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.log_lines.kernel_lines import finding_of
from holdfast.detectors.log_lines.xids import finding
from holdfast.detectors.nodes.counter_deltas import grown_errors
from holdfast.detectors.nodes.findings import FaultFinding
from holdfast.detectors.nodes.gpu_readings import Xid
from holdfast.detectors.nodes.health import fault_findings
from holdfast.detectors.nodes.line_check import NOTHING, LineCheck
from holdfast.detectors.nodes.readings import KernelLine, KubernetesReading, NodeReading
from holdfast.log import note
from holdfast.probe.readers.collect import look
from holdfast.protocol import LineBuffer, Message, encode

log = logging.getLogger("holdfast.agent.monitor")

INTERVAL: Final = 60.0
"""Seconds between two samples: faults that only counters show develop slowly, and a sample costs some 0.2 s of a processor."""
DELAY: Final = 0.5
"""Seconds from an event to a sample of what came of it: one thing seldom happens alone."""
MIN_INTERVAL: Final = 5.0
READER_SECONDS: Final = 10.0
"""Seconds that each reader of a sample may take."""
SAMPLE_SECONDS: Final = 40.0
"""Seconds after which a sample is given up that has not even reported what it could not read."""
QUIET: Final = 60.0
"""Seconds for which the same fault of the same part is not reported again: a driver may log an error a thousand times in one."""
MAX_LINES: Final = 100
"""Log lines that are judged within a second; a flooded log repeats itself, and judging costs time."""
RTMGRP_LINK: Final = 1
"""The multicast group of link changes; see rtnetlink(7)."""


Key = tuple[str, str, Certainty]
"""Kind and part of a fault, and how much its report says: one that says less must not hide it."""


class Deduplicator:
    """Reports each fault once, by its kind and part: first what may be one, and what proves it in any case."""

    def __init__(self, node: str, send: Callable[[Message], None]) -> None:
        self._node, self._send = node, send
        self._reported: dict[Key, float] = {}
        self._present: frozenset[tuple[str, str]] = frozenset()
        self._dropped: Counter[Key] = Counter()
        """How many equal reports were not sent since the first one, until that is over and logged."""

    def happened(self, found: FaultFinding, source: str, at: float, now: float, check: LineCheck = NOTHING) -> bool:
        """Report what happened (*at*, wall clock) unless it was reported a moment ago; return whether it is news. *now* is monotonic."""
        key = (found.kind, found.part, Certainty.CONTRADICTED if check.contradicted else certainty_of(found))
        again = self._is_recent(key, now)
        self._reported[key] = now
        if again or key[:2] in self._present:
            self._dropped[key] += 1
        else:
            self._report(found, source, at, check)
        return not again

    def is_reported(self, found: FaultFinding, now: float) -> bool:
        """Return whether *found*, or more, was reported a moment ago and not contradicted; count it then. *now* is monotonic."""
        key = (found.kind, found.part, certainty_of(found))
        if again := self._is_recent(key, now):
            self._reported[key] = now
            self._dropped[key] += 1
        return again

    def sampled(
        self,
        findings: Iterable[tuple[str, FaultFinding]],
        at: float,
        now: float,
        is_unused: Callable[[FaultFinding], bool] = lambda _: False,
    ) -> None:
        """Report the findings of a sample, each with its source, that the sample before had not and that were not reported a moment ago.

        *is_unused*: whether one is of a part that the job does not use.
        """
        present = {(one.kind, one.part): (source, one) for source, one in findings}
        for part in [part for part in present if part not in self._present]:
            key = (*part, Certainty.PROOF)  # it was measured
            if not self._is_recent(key, now):
                source, one = present[part]
                self._report(one, source, at, LineCheck(unused=is_unused(one)))
            self._reported[key] = now
        self._present = frozenset(present)
        for key in [key for key, when in self._reported.items() if now - when >= QUIET]:
            del self._reported[key]
            if times := self._dropped.pop(key, 0):
                note(log, "fault.repeated", kind=key[0], part=key[1], times=times)

    def _is_recent(self, key: Key, now: float) -> bool:
        """Return whether *key*, or what says more of the same, was reported a moment ago."""
        return any(now - self._reported.get((*key[:2], level), -QUIET) < QUIET for level in Certainty if level >= key[2])

    def _report(self, found: FaultFinding, source: str, at: float, check: LineCheck = NOTHING) -> None:
        facts = {"fault": found.kind, "part": found.part, "quote": found.quote, "source": f"{source} on {self._node}", "at": at}
        if not isinstance(check.addresses, Unknown):
            facts["link"] = {"addresses": list(check.addresses), "adapters": list(check.adapters), "stacked": check.stacked}
        if check.unused:
            facts["unused"] = True
        self._send(facts | {name: text for name in ("contradicted", "supported") if (text := getattr(check, name))})


class EventBudget:
    """How many log lines may still be judged in this second."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_LINES)
        self.skipped = 0
        """Lines that were not judged, in all."""

    def allows(self, now: float) -> bool:
        """Use up one line; False when there is none left."""
        if len(self._times) == MAX_LINES and now - self._times[0] < 1.0:
            self.skipped += 1
            return False
        self._times.append(now)
        return True


class MonitorLoop:
    """Everything that the monitor waits for. One thread, so that it may fork."""

    def __init__(self, agent: socket.socket, node: str, kernel_log: Path, root: Path) -> None:
        self._agent, self._node, self._root = agent, node, root
        self._lines = LineBuffer()
        self._reports, self._budget = Deduplicator(node, self._send), EventBudget()
        self._selector = selectors.DefaultSelector()
        self._before: NodeReading | None = None
        self._baseline: NodeReading | None = None
        self._ended: tuple[int, NodeReading | None] | None = None
        """Generation in which a worker crashed and the sample from before it: the difference is reported with the next sample."""
        self._sampling: tuple[int, int, bytearray] | None = None
        """The process that samples now: its pid, its pipe, and what it has written."""
        self._children = ChildReaper()
        self._listener = NvmlListener(self._children, self._selector, self._on_gpu_message, self._send)
        self._next_sample = self._last_sample = time.monotonic()
        self._checks = LineChecks(self._children, self._selector, root)
        self._kernel = KernelLogFollower(kernel_log)
        self._conditions = ConditionWatch(time.time())
        self._links = link_changes()

    def run(self) -> None:
        """Monitor until the agent exits."""
        self._checks.keep(self._checks.read_all(LIMIT))  # a sample takes long on a busy machine
        self._listener.begin()
        self._kernel.subscribe(self._on_kernel_line)
        self._kernel.register(self._selector)
        self._selector.register(self._agent, selectors.EVENT_READ, lambda _mask: self._on_agent_message())
        if self._links is not None:
            self._selector.register(self._links, selectors.EVENT_READ, lambda _mask: self._on_link_change())
        while True:
            next_sample = self._next_sample if self._sampling is None else self._last_sample + SAMPLE_SECONDS
            times = [at for at in (self._kernel.due(), self._listener.due(), self._checks.due(), next_sample) if at is not None]
            for key, mask in self._selector.select(max(0.0, min(times) - time.monotonic())):
                key.data(mask)
            now = time.monotonic()
            self._kernel.tick(now)
            self._listener.tick(now)
            self._checks.tick(now)
            if self._sampling is None and now >= self._next_sample:
                self._start_sample(now)
            elif self._sampling is not None and now >= self._last_sample + SAMPLE_SECONDS:
                os.kill(self._sampling[0], signal.SIGKILL)
                self._end_sample()
                note(log, "sample.timed-out", seconds=SAMPLE_SECONDS)

    def _send(self, message: Message) -> None:
        self._agent.sendall(encode(message))

    # -- what happens ---------------------------------------------------------------------------------------------------

    def _on_agent_message(self) -> None:
        data = self._agent.recv(1 << 16)
        if not data:
            raise EOFError
        for message in self._lines.feed(data):
            if "generation" in message:
                self._baseline = self._before
            if "ended" in message:
                self._ended = self._ended or (int(message["ended"]), self._baseline)
                self._sample_soon()

    def _sample_soon(self) -> None:
        self._next_sample = min(self._next_sample, max(time.monotonic() + DELAY, self._last_sample + MIN_INTERVAL))

    def _on_kernel_line(self, line: KernelLine) -> None:
        at, now = time.time(), time.monotonic()
        if not self._budget.allows(now):
            if self._budget.skipped == 1:
                note(log, "kernel-log.flooded", max_lines_per_second=MAX_LINES)
            return
        found = finding_of(line)
        if found is None:
            return
        self._conditions.saw_line(found, at)
        if self._checks.runs(found) or self._reports.is_reported(found, now):
            return

        def report(check: LineCheck) -> None:
            if self._reports.happened(found, KERNEL_LOG, at, now, check):
                self._sample_soon()

        self._checks.begin(found, report)

    def _on_gpu_message(self, message: Message) -> None:
        if "blind" in message:
            note(log, "gpu-events.unavailable", why=message["blind"])
            return
        found = finding(unpacked(Xid, message["xid"]))
        if found is not None and self._reports.happened(found, DRIVER_EVENTS, message["at"], time.monotonic()):
            self._sample_soon()

    def _on_link_change(self) -> None:
        assert self._links is not None
        if drain(self._links):
            self._sample_soon()

    # -- samples --------------------------------------------------------------------------------------------------------

    def _start_sample(self, now: float) -> None:
        """Have another process sample the node: it may hang, which this one may not."""
        ours, its = os.pipe()
        pid = self._children.fork(its)
        if pid == 0:
            try:
                os.nice(15)  # it can wait for a processor that nobody else wants
                answer = json.dumps(
                    self._checks.read_all(READER_SECONDS) | {"reading": look(self._node, self._root, READER_SECONDS)}
                ).encode()
                while answer:
                    answer = answer[os.write(its, answer) :]
            finally:
                os._exit(0)
        os.close(its)
        self._sampling = pid, ours, bytearray()
        self._last_sample, self._next_sample = now, now + INTERVAL
        self._selector.register(ours, selectors.EVENT_READ, lambda _mask: self._read_sample())

    def _read_sample(self) -> None:
        assert self._sampling is not None
        _, pipe, answer = self._sampling
        data = os.read(pipe, 1 << 18)
        answer += data
        if data:
            return
        self._end_sample()
        try:
            sample = json.loads(bytes(answer))
            reading = unpacked(NodeReading, sample["reading"])
            self._checks.keep(sample)
        except (ValueError, MalformedData) as error:
            note(log, "sample.failed", why=error)
            return
        self._send({"sampled": True})
        self._on_conditions(reading.kubernetes, reading.at)
        # The kernel's log is followed already, and conditions are lines as well, which may prove a fault or not.
        reading = replace(reading, kernel=NOT_REQUESTED, kubernetes=NOT_REQUESTED)
        before, self._before = self._before, reading
        if self._baseline is None:
            self._baseline = reading
        self._reports.sampled(fault_findings(reading, before), reading.at, time.monotonic(), self._checks.is_unused)
        if self._ended is not None:
            (generation, since), self._ended = self._ended, None
            if since is not None:
                increases = grown_errors(since, reading)
                self._send({"counter_increases": increases, "generation": generation, "seconds": reading.at - since.at})

    def _on_conditions(self, found: KubernetesReading | Unknown, at: float) -> None:
        if (why := self._conditions.unreadable(found)) is not None:
            self._send({"conditions_unreadable": why})
        for one, began in self._conditions.news(found, at):
            self._reports.happened(one, one.source or NODE_CONDITIONS, began, time.monotonic())

    def _end_sample(self) -> None:
        assert self._sampling is not None
        pid, pipe, _ = self._sampling
        self._selector.unregister(pipe)
        os.close(pipe)
        self._children.status(pid)  # its exit status says nothing; it is reaped when it ends
        self._sampling = None


def link_changes() -> socket.socket | None:
    """Return a socket that becomes readable when a network link changes; None where the system has none."""
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        sock.bind((0, RTMGRP_LINK))
    except (OSError, AttributeError):
        return None
    return sock


def drain(sock: socket.socket) -> bool:
    """Discard what has come; return whether there was anything. Too much at once (ENOBUFS) counts too."""
    found = False
    while True:
        try:
            sock.recv(1 << 16)
        except BlockingIOError:
            return found
        except OSError:
            return True
        found = True
