"""The agent's memory of what happened: numbered lines in a file, so that a flow that was away can be told."""

from __future__ import annotations

import heapq
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.protocol import BadLine, Message, decode, encode

LARGEST: Final = 32 * 1024 * 1024
"""Bytes after which the file is set aside and a new one begun; one older file is kept."""
REMEMBERED: Final = 4096
"""Newest events that are kept in memory too, and told without reading the file."""

EVENT_LOG: Final = "event-log.jsonl"
"""The file's name, in the folder of the node."""
BEFORE: Final = ".before"
"""Suffix of the journal of the agent before."""
PAST: Final = 500
"""Events of an agent that is gone which are told again."""

_NUMBERED: Final = re.compile(rb'\{"seq":(\d{1,18}),.*\}\n', re.DOTALL)

TOLD_AGAIN: Final = frozenset({"steps", "saved"})
_HELD: Final = b'{"held":'
"""How a line begins that says which job the following ones belong to: it is no event, and has no number."""
_WORTH: Final = (b'"event":"steps"', b'"event":"saved"', b'"event":"past"')

Event = tuple[int, bytes]
"""An event's number and its line."""


class EventLog:
    """Append-only, with sequence numbers from 1. A line is in the kernel before its event is sent, so kill -9 loses none that was told.

    Most lines are finished steps: after days of them the oldest are dropped. What else happened in the current generation, its milestones,
    is never dropped, or a flow that adopts a job after a week would not know of its workers.
    """

    def __init__(self, path: Path, *, largest: int = LARGEST, remembered: int = REMEMBERED) -> None:
        self._path, self._older, self._largest = path, path.with_suffix(".old"), largest
        with suppress(FileNotFoundError):
            path.replace(path.with_suffix(BEFORE))
        self._older.unlink(missing_ok=True)
        self._file = self._open()
        self._size = 0
        self._recent: deque[Event] = deque(maxlen=remembered)
        self._milestones: list[Event] = []
        self.seq = 0
        self.failing: str | None = None
        """Why the newest event is not on disk."""

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def begin_generation(self) -> None:
        """Let go of the milestones of the generation before."""
        self._milestones.clear()

    def hold(self, job: str) -> None:
        """Note that what follows is of *job*, for whoever reads the file once this agent is gone (`past`)."""
        self._write(encode({"held": job}))

    def add(self, event: Message, *, milestone: bool = True) -> bytes:
        """Give *event* its number, keep it, and return its line. On a full disk it is kept in memory alone."""
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
            if self._size > self._largest:
                self._rotate()
            self.failing = None
        except OSError as error:
            self.failing = error.strerror or str(error)

    def _rotate(self) -> None:
        self._path.replace(self._older)
        fresh = self._open()
        os.close(self._file)
        self._file, self._size = fresh, 0

    def since(self, seq: int) -> Iterator[Event]:
        """Yield the events after *seq*, oldest first, up to the newest there is when the reader gets so far."""
        while seq < self.seq:
            for number, line in self._after(seq):
                yield number, line
                seq = number

    def _after(self, seq: int) -> Iterator[Event]:
        recent = list(self._recent)
        first = recent[0][0]
        if first > seq + 1:
            kept = [event for event in self._milestones if seq < event[0] < first]
            for event in heapq.merge(kept, self._stored(seq, first)):
                if event[0] > seq:  # a milestone may be on disk as well
                    seq = event[0]
                    yield event
        yield from (event for event in recent if event[0] > seq)

    def _stored(self, seq: int, before: int) -> Iterator[Event]:
        """Yield the events on disk after *seq* and before *before*; both files are opened first, as they may be rotated meanwhile."""
        files = []
        for path in (self._older, self._path):
            with suppress(OSError):
                files.append(path.open("rb"))
        try:
            for file in files:
                for line in file:
                    found = _NUMBERED.fullmatch(line)
                    if found and seq < int(found[1]) < before and _is_whole(line, int(found[1])):
                        yield int(found[1]), line
        finally:
            for file in files:
                file.close()


def past(path: Path, job: str, *, most: int = PAST) -> list[Message]:
    """Return the newest steps and checkpoints that agents of *job* have journaled at *path*, or before that, oldest first.

    They may not have lived to tell them. Half a line at the end tells of nothing.
    """
    lines, ours = deque[bytes](maxlen=most), False
    for file in (path.with_suffix(BEFORE), path):
        with suppress(OSError), file.open("rb") as opened:
            for line in opened:  # there may be a million: only the last are read
                if line.startswith(_HELD):
                    ours = _event(line).get("held") == job
                elif ours and any(one in line for one in _WORTH):
                    lines.append(line)
    found = (inner for line in lines for inner in _inner(_event(line)))
    each = {encode(one): one for one in found if one.get("event") in TOLD_AGAIN}  # an agent journals what it tells again
    return list(each.values())[-most:]


def _event(line: bytes) -> Message:
    """Return the event in a line; nothing in particular where it is damaged."""
    try:
        return decode(line)
    except BadLine:
        return {}


def _inner(event: Message) -> list[Message]:
    inner = event.get("events") if event.get("event") == "past" else [event]
    return [one for one in inner if isinstance(one, dict)] if isinstance(inner, list) else []


def _is_whole(line: bytes, number: int) -> bool:
    """Tell whether a line from the disk is the event of that number: a flow that is told garbage hangs up, and would be told it again."""
    try:
        return decode(line).get("seq") == number
    except BadLine:
        return False
