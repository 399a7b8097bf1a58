"""The agent's memory of what happened: numbered lines in a file, so that a flow that was away can be told."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.wire import BadLine, Message, decode, encode

LARGEST: Final = 64 * 1024 * 1024
"""Bytes after which the file is set aside and a new one begun; one older file is kept."""
REMEMBERED: Final = 4096
"""Newest events that are replayed without reading the file."""


class Journal:
    """Append-only, with sequence numbers from 1. A line is in the kernel before its event is sent, so kill -9 loses none that was told."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            os.replace(path, path.with_suffix(".before"))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._recent: deque[Message] = deque(maxlen=REMEMBERED)
        self.seq = 0
        self.failing: str | None = None

    def add(self, event: Message) -> Message:
        """Number *event* and keep it. A full disk costs the file, not the event: it stays in memory and is still sent."""
        self.seq += 1
        event = {"seq": self.seq, **event}
        self._recent.append(event)
        try:
            self._size += os.write(self._file, encode(event))
            self.failing = None
        except OSError as error:
            self.failing = str(error)
        if self._size > LARGEST:
            self._rotate()
        return event

    def since(self, seq: int) -> Iterator[Message]:
        """Yield the events after *seq*, oldest first."""
        recent = list(self._recent)
        if recent and recent[0]["seq"] <= seq + 1:
            yield from (event for event in recent if event["seq"] > seq)
            return
        first = recent[0]["seq"] if recent else self.seq + 1
        for path in (self._path.with_suffix(".old"), self._path):
            yield from (event for event in _lines(path) if seq < event.get("seq", 0) < first)
        yield from recent

    def _rotate(self) -> None:
        os.close(self._file)
        os.replace(self._path, self._path.with_suffix(".old"))
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0


def _lines(path: Path) -> Iterator[Message]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                yield decode(line)
            except BadLine:
                continue  # a line torn by a full disk


def write_json(path: Path, facts: Message) -> None:
    """Write *facts* to *path* whole or not at all, for its owner only."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(facts))
    beside.chmod(0o600)
    os.replace(beside, path)
