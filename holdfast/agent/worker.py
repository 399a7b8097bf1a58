"""What the agent knows about one worker."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.process import state_of, wait_of

TAIL: Final = 8192
"""Bytes of a worker's output that travel with its end."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rank's process in one generation."""

    rank: int
    generation: int
    log: Path
    log_begin: int = 0
    """Size of the log when this worker started: what comes after is its own."""
    pid: int | None = None
    started: float = 0.0
    managed: bool = False
    step: int | None = None
    first_step: float | None = None
    progress: float = field(default_factory=time.monotonic)
    """When it last showed progress (monotonic)."""
    section: str | None = None
    section_limit: float | None = None
    raised: dict[str, Any] | None = None
    finished: bool = False
    gone: bool = False

    def advance(self) -> None:
        """Note a sign of progress."""
        self.progress = time.monotonic()

    def view(self) -> dict[str, Any]:
        """Return how far this worker is, for the beat that goes to the flow."""
        return {
            "step": self.step,
            "age": round(time.monotonic() - self.progress, 3),
            "section": self.section,
            "section_limit": self.section_limit,
            "managed": self.managed,
            "process": state_of(self.pid) if self.pid else "?",
            "wait": wait_of(self.pid) if self.pid else "",
            "output_age": self._output_age(),
            "pid": self.pid,
        }

    def _output_age(self) -> float | None:
        try:
            return round(max(0.0, time.time() - max(self.log.stat().st_mtime, self.started)), 3)
        except OSError:
            return None

    def open_log(self) -> None:
        """Say in the log where this worker's output begins; raise ``OSError`` when there can be no log."""
        line = f"--- holdfast: rank {self.rank}, generation {self.generation}\n".encode()
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self.log_begin = os.fstat(log).st_size
            self.log_begin += os.write(log, line)
        except OSError:  # a full disk: the worker may still train, only its output is lost
            return
        finally:
            os.close(log)

    def tail(self) -> str:
        """Return the last lines of this worker's own output; bytes that are no text are replaced."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.log_begin, end - TAIL))
                return file.read(TAIL).decode(errors="replace").replace("\0", "\ufffd")
        except OSError:
            return ""
