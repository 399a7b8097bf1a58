"""What an agent keeps on disk for controllers: the log of its events, and the outbox of rows that the history does not accept."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast.agent.errors import Refused
from holdfast.protocol import BadLine, Message, decode, encode

MAX_BYTES: Final = 32 * 1024 * 1024
"""Bytes after which the file is rotated; one older file is kept."""
MAX_RECENT: Final = 4096
"""Newest events that are also kept in memory, and sent without reading the file."""
EVENT_LOG: Final = "event-log.jsonl"
"""The file's name, in the folder of the node."""
BEFORE: Final = ".before"
"""Suffix of the previous agent's log."""
MAX_REPLAYED: Final = 500
"""Events of a previous agent that are sent again."""
REPLAYED: Final = frozenset({"steps", "saved"})
OUTBOX_BYTES: Final = 64 * 2**20
"""Size of an outbox: hours of a job's rows."""
OUTBOX_CHUNK: Final = 2**20
"""Bytes of one answer."""

_NUMBERED: Final = re.compile(rb'\{"seq":(\d{1,18}),.*\}\n', re.DOTALL)
_JOB: Final = b'{"job":'
"""How a line begins that says which job the following ones belong to: it is no event, and has no number."""
_REPLAYED: Final = (b'"event":"steps"', b'"event":"saved"', b'"event":"replay"')

NumberedLine = tuple[int, bytes]
"""An event's number and its line."""


class EventLog:
    """Append-only, with sequence numbers from 1. A line is in the kernel before its event is sent: a killed agent loses none that was sent.

    Most lines are finished steps: after days of them the oldest are dropped. The other events of the current generation, its milestones,
    are never dropped, or a controller that reattaches after a week would not know of the job's workers.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, max_recent: int = MAX_RECENT) -> None:
        self._path, self._older, self._max_bytes = path, path.with_suffix(".old"), max_bytes
        with suppress(FileNotFoundError):
            path.replace(path.with_suffix(BEFORE))
        self._older.unlink(missing_ok=True)
        self._file = self._open()
        self._size = 0
        self._recent: deque[NumberedLine] = deque(maxlen=max_recent)
        self._milestones: list[NumberedLine] = []
        self.seq = 0
        self.failing: str | None = None
        """Why the newest event is not on disk."""

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def begin_generation(self) -> None:
        """Drop the milestones of the previous generation."""
        self._milestones.clear()

    def begin_job(self, job: str) -> None:
        """Record that the following events are of *job*, for `replayed_events`."""
        self._write(encode({"job": job}))

    def add(self, event: Message, *, milestone: bool = True) -> bytes:
        """Give *event* its number, store it, and return its line. On a full disk it is kept in memory only."""
        self.seq += 1
        line = encode({"seq": self.seq, **event})
        self._recent.append((self.seq, line))
        if milestone:
            self._milestones.append((self.seq, line))
        self._write(line)
        return line

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.ftruncate(self._file, self._size)  # half a line would spoil the next one too
                self.failing = "No space left on device"
                return
            self._size += written
            if self._size > self._max_bytes:
                self._path.replace(self._older)
                new = self._open()
                os.close(self._file)
                self._file, self._size = new, 0
            self.failing = None
        except OSError as error:
            self.failing = error.strerror or str(error)

    def since(self, seq: int) -> Iterator[NumberedLine]:
        """Yield the events after *seq*, oldest first, up to the newest there is when the reader gets so far."""
        while seq < self.seq:
            for number, line in self._after(seq):
                yield number, line
                seq = number

    def _after(self, seq: int) -> Iterator[NumberedLine]:
        recent = list(self._recent)
        first = recent[0][0]
        if first > seq + 1:
            milestones = [event for event in self._milestones if seq < event[0] < first]
            for event in heapq.merge(milestones, self._stored(seq, first)):
                if event[0] > seq:  # a milestone may be on disk as well
                    seq = event[0]
                    yield event
        yield from (event for event in recent if event[0] > seq)

    def _stored(self, seq: int, before: int) -> Iterator[NumberedLine]:
        """Yield the events on disk after *seq* and before *before*; both files are opened first, as they may be rotated meanwhile."""
        files = []
        for path in (self._older, self._path):
            with suppress(OSError):
                files.append(path.open("rb"))
        try:
            for file in files:
                for line in file:
                    found = _NUMBERED.fullmatch(line)
                    # A damaged line is never sent: the controller would disconnect, and get it again.
                    if found and seq < int(found[1]) < before and _event(line).get("seq") == int(found[1]):
                        yield int(found[1]), line
        finally:
            for file in files:
                file.close()


def replayed_events(path: Path, job: str, *, most: int = MAX_REPLAYED) -> list[Message]:
    """Return the newest steps and checkpoints that agents of *job* have logged at *path*, or before that, oldest first.

    These agents may have been killed before they sent them. A half-written last line is skipped.
    """
    lines, ours = deque[bytes](maxlen=most), False
    for file in (path.with_suffix(BEFORE), path):
        with suppress(OSError), file.open("rb") as opened:
            for line in opened:  # there may be a million: only the last are parsed
                if line.startswith(_JOB):
                    ours = _event(line).get("job") == job
                elif ours and any(mark in line for mark in _REPLAYED):
                    lines.append(line)
    found: list[Any] = []
    for event in map(_event, lines):
        inner = event.get("events") if event.get("event") == "replay" else [event]  # agents log what they replay
        found += inner if isinstance(inner, list) else []
    unique = {encode(one): one for one in found if isinstance(one, dict) and one.get("event") in REPLAYED}
    return list(unique.values())[-most:]


def _event(line: bytes) -> Message:
    """Return the event in a line; an empty one where it is damaged."""
    try:
        return decode(line)
    except BadLine:
        return {}


class AgentOutbox:
    """A file of JSON lines in the node's folder, readable by its owner only. It is not forced to the disk: that would delay the agent."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "outbox.jsonl"

    def add(self, records: list[dict[str, Any]]) -> None:
        """Append *records*; refuse them when there is no room."""
        data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab", buffering=0) as file:  # noqa: PTH123 (a descriptor)
            if file.tell() + len(data) > OUTBOX_BYTES:
                raise Refused(f"more than {OUTBOX_BYTES} bytes of rows are in the outbox already")
            file.write(data)

    def since(self, offset: int) -> tuple[list[dict[str, Any]], int | None]:
        """Return records from *offset* on, and where the next ones begin; a torn line is skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                data = file.read(OUTBOX_CHUNK)
        except FileNotFoundError:
            return [], None
        complete = data[: data.rfind(b"\n") + 1]
        found = []
        for line in complete.splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    found.append(record)
        return found, offset + len(complete) if complete else None

    def clear(self) -> None:
        """Remove all."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
