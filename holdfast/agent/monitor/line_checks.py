"""Ask the kernel about the part of the node that a line of its log names, in a child process: firmware or a server may not answer."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from holdfast.agent.monitor.nvml_events import ChildReaper
from holdfast.detectors.codec import BLIND, MalformedData, packed, unpacked
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.findings import FaultFinding
from holdfast.detectors.nodes.line_check import NOTHING, LineCheck
from holdfast.detectors.nodes.links import LinkReading, check_link_line, is_about_link
from holdfast.detectors.nodes.memory_errors import MemoryErrors, check_memory_line, is_about_memory
from holdfast.detectors.nodes.volumes import VolumeReading, check_volume_line, is_about_volume, is_unused, with_earlier_use
from holdfast.host.process import children_of
from holdfast.log import note
from holdfast.probe.readers.collect import run_in_children
from holdfast.probe.readers.links import read_links
from holdfast.probe.readers.volumes import read_memory_errors, read_volumes

log = logging.getLogger("holdfast.agent.monitor")

SETTLE: Final = 0.1
"""Seconds until what does not agree with a line is read again: a driver may write the line first and tell the kernel then."""
LIMIT: Final = 0.5
"""Seconds after which a line is reported without a check: far less than the peers of a lost link need to fail."""
BEFORE: Final = 2.0
"""Seconds by which a reading must be older than a line to show the state before: a syslog daemon writes some time after the kernel."""
MAX_KEPT: Final = 4
MAX_AT_ONCE: Final = 8
"""Checks that may run: further lines are reported unchecked."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject(Generic[T]):
    """A part of the node that lines are about, of which the kernel can be asked."""

    reading: type[T]
    read: Callable[[str], T]
    """Reads it because of a line; of an empty one for a sample."""
    is_about: Callable[[str], bool]
    """Whether lines of a kind are about it."""
    check: Callable[[str, str, list[T], T, float], LineCheck]
    """Judges a line by its kind and text, the first and the last reading from before, the one from now, and the seconds in between."""
    joined: Callable[[T, T], T] = lambda new, _: new
    """Adds to a reading what an earlier one knew."""


def processes_of_job(agent: int, monitor: int | None = None) -> Iterator[int]:
    """Yield *agent* and all processes that it began, without *monitor* and those that this one began."""
    found = [agent]
    for pid in found:
        yield pid
        found += [child for child in children_of(pid) if child != monitor and child not in found]


def _subjects(root: Path, agent: int, monitor: int) -> dict[str, _Subject[Any]]:
    return {
        "links": _Subject(reading=LinkReading, read=lambda _: read_links(root), is_about=is_about_link, check=check_link_line),
        "volumes": _Subject(
            reading=VolumeReading,
            read=lambda text: read_volumes(root, processes_of_job(agent, monitor), text),
            is_about=is_about_volume,
            check=check_volume_line,
            joined=with_earlier_use,
        ),
        "memory": _Subject(
            reading=MemoryErrors, read=lambda _: read_memory_errors(root), is_about=is_about_memory, check=check_memory_line
        ),
    }


@dataclass(slots=True)
class _Running:
    """A child that reads, and the line for which it does."""

    found: FaultFinding
    begun: float
    pid: int
    pipe: int
    done: Callable[[LineCheck], None]
    answer: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Kept(Generic[T]):
    """Readings of a subject from before, to compare with."""

    first: T
    newest: deque[tuple[float, T]]

    def before(self, line: float) -> tuple[list[T], float]:
        """Return the first reading and the last one that is surely older than a line of that time, and when that was."""
        older = [(at, reading) for at, reading in self.newest if at <= line - BEFORE]
        return ([self.first, older[-1][1]], older[-1][0]) if older else ([], line)


class LineChecks:
    """The checks that run, and the readings from before to compare with; for a process without threads that the agent began."""

    def __init__(self, children: ChildReaper, selector: selectors.BaseSelector, root: Path) -> None:
        self._children, self._selector = children, selector
        self._subjects = _subjects(root, os.getppid(), os.getpid())
        self._kept: dict[str, _Kept[Any]] = {}
        self._running: dict[tuple[str, str, str], _Running] = {}

    def read_all(self, seconds: float) -> dict[str, Any]:
        """Return all subjects as JSON values within *seconds*, and when they were read."""
        at = time.monotonic()
        jobs = {name: partial(lambda read: packed(read("")), subject.read) for name, subject in self._subjects.items()}
        return {"at": at, **run_in_children(jobs, at + seconds, "no answer in time")}

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Keep what `read_all` returned to compare with; raise `MalformedData` if it is no such thing."""
        for name, subject in self._subjects.items():
            if BLIND in answer[name]:
                continue
            reading, at = unpacked(subject.reading, answer[name]), float(answer["at"])
            if name not in self._kept:
                self._kept[name] = _Kept(first=reading, newest=deque(maxlen=MAX_KEPT))
                self._note_first(reading)
            kept = self._kept[name].newest
            kept.append((at, subject.joined(reading, kept[-1][1]) if kept else reading))

    def _note_first(self, reading: object) -> None:
        if isinstance(reading, LinkReading):
            note(log, "links.read", links="unknown" if isinstance(reading.links, Unknown) else len(reading.links), host=reading.is_host)
        elif isinstance(reading, VolumeReading):
            known = "unknown" if isinstance(reading.volumes, Unknown) else len(reading.volumes)
            note(log, "volumes.read", volumes=known, used=reading.used.why if isinstance(reading.used, Unknown) else " ".join(reading.used))

    def is_unused(self, found: FaultFinding) -> bool:
        """Return whether *found*, measured in the last sample, is of a disk or a mount that no process of the job has used."""
        if not is_about_volume(found.kind) or (kept := self._kept.get("volumes")) is None:
            return False
        return is_unused(found.part, [kept.first, kept.newest[-1][1]], kept.newest[-1][1])

    def runs(self, found: FaultFinding) -> bool:
        """Return whether a line of the same kind about the same part is being checked; one that proves a fault is checked in any case."""
        return _key(found) in self._running

    def begin(self, found: FaultFinding, done: Callable[[LineCheck], None]) -> None:
        """Check a line; call *done* with the result, an empty one where none can be had in time."""
        subject = next((name for name, one in self._subjects.items() if one.is_about(found.kind)), None)
        if subject is None or len(self._running) >= MAX_AT_ONCE:
            done(NOTHING)
            return
        ours, its = os.pipe()
        begun = time.monotonic()
        pid = self._children.fork(its)
        if pid == 0:
            try:
                answer = json.dumps(packed(self._check(subject, found, begun))).encode()
                while answer:
                    answer = answer[os.write(its, answer) :]
            finally:
                os._exit(0)
        os.close(its)
        one = _Running(found, begun, pid, ours, done)
        self._running[_key(found)] = one
        self._selector.register(ours, selectors.EVENT_READ, lambda _mask: self._read(one))

    def _check(self, name: str, found: FaultFinding, begun: float) -> LineCheck:
        """Return what the kernel says of a line: at once where it agrees or cannot say anything, as the diagnosis may be waiting for it."""
        subject = self._subjects[name]
        earlier, since = self._kept[name].before(begun) if name in self._kept else ([], begun)

        def look() -> LineCheck:
            now = subject.read(found.quote)
            return subject.check(found.kind, found.quote, earlier, now, time.monotonic() - since)

        check = look()
        if check.supported or check == NOTHING:
            return check
        time.sleep(SETTLE)
        return look()

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
            try:
                check = unpacked(LineCheck, json.loads(bytes(one.answer)))
            except (ValueError, MalformedData):  # its reader failed
                check = NOTHING
            self._end(one, check)

    def _end(self, one: _Running, check: LineCheck) -> None:
        self._selector.unregister(one.pipe)
        os.close(one.pipe)
        self._children.status(one.pid)  # its exit status says nothing; it is reaped when it ends
        del self._running[_key(one.found)]
        one.done(check)


def _key(found: FaultFinding) -> tuple[str, str, str]:
    return found.kind, found.part, found.quote if found.is_proof else ""
