"""What the agent knows about one worker."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.agent.workers import error_file
from holdfast.agent.workers.step_timing import StepTimings
from holdfast.process import state_of, wait_of
from holdfast.protocol import Message

if TYPE_CHECKING:
    from holdfast.agent.connection import ClientConnection

NO_RANK: Final = -1
"""The rank of a standby."""
SEES: Final = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
"""Variables by which a rank chooses its GPU."""
MOST_HELD: Final = 4096
"""Messages of one worker that wait for its generation to be on record; of more the oldest are dropped."""
MOST_CHECKS: Final = 4
"""Digests that beats carry: each may be lost, and nodes beat at different times."""
TAIL: Final = 8192
"""Bytes of a worker's output that travel with its end."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rank's process; it may stay that over several generations, or have been a standby before."""

    rank: int
    generation: int
    log: Path
    standby: int | None = None
    """Its number as a standby, until it becomes the worker of a rank."""
    ticket: int = -1
    """What its birth was asked for under."""
    log_begin: int = 0
    """Size of the log when this worker started: what comes after is its own."""
    log_before: tuple[Path, int] | None = None
    """The log it had as a standby, for as long as it has written nothing to the rank's."""
    error_file: Path | None = None
    """Where its script may leave the error that ends it."""
    pid: int | None = None
    started: float = 0.0
    managed: bool = False
    heartbeats: bool = False
    """It reports steps and keeps its own state: no goodbye is to be expected of it."""
    step: int | None = None
    first_step: float | None = None
    progress: float = field(default_factory=time.monotonic)
    """When it last showed progress (monotonic)."""
    snapshot: Message = field(default_factory=dict)
    """What it has said of its snapshots in memory in this generation; see `holdfast.agent.memstore.snapshot_report`."""
    paces: StepTimings = field(default_factory=StepTimings)
    """How its steps spent their time, in this generation."""
    checks: deque[Message] = field(default_factory=lambda: deque(maxlen=MOST_CHECKS))
    """The newest digests of its parameters in this generation."""
    bad_loss: bool = False
    """The loss that it told last is no number."""
    section: str | None = None
    section_limit: float | None = None
    raised: dict[str, Any] | None = None
    finished: bool = False
    gone: bool = False
    ordered: bool = False
    """Its end is wanted: it was killed by an order, or leaves."""
    leave_by: float | None = None
    """When it is killed if it has not left by then (monotonic)."""
    grouped: bool = False
    """Its process groups are Holdfast's own: it can be kept when others are lost. Who comes to ranks that live joins them no other way."""
    parked: Message | None = None
    """What it said when it was ready to stand by."""
    sees: dict[str, str] = field(default_factory=dict)
    """Of its environment what says which GPU it takes (`SEES`)."""
    line: ClientConnection | None = None
    """The connection on which it said hello, for what the agent tells it."""
    greetings: list[Message] = field(default_factory=list)
    """What it is to be told once it says hello."""
    former: int | None = None
    """The generation it was kept from, until it has resumed in the new one."""
    ahead: int | None = None
    """The generation it has switched to by itself; what it says there is held until that is on record."""
    held: deque[tuple[ClientConnection, Message]] = field(default_factory=lambda: deque(maxlen=MOST_HELD))

    @property
    def name(self) -> str:
        """Return what it is called in logs."""
        return f"rank {self.rank}, generation {self.generation}" if self.standby is None else f"standby {self.standby}"

    def left_error(self) -> dict[str, Any] | None:
        """Return the error that its script has left for its launcher, if it did; it is there once."""
        return None if self.error_file is None else error_file.take(self.error_file)

    @property
    def is_ahead(self) -> bool:
        """Tell whether it has gone on into a generation that is not on record here yet."""
        return self.ahead is not None and self.ahead > self.generation

    def advance(self) -> None:
        """Note a sign of progress."""
        self.progress = time.monotonic()

    def enter(self, generation: int) -> None:
        """Go on into a new generation, in which it has done no step yet."""
        self.generation, self.first_step = generation, None
        self.section, self.section_limit = None, None
        self.snapshot, self.paces, self.bad_loss = {}, StepTimings(), False
        self.checks.clear()
        self.advance()

    def promote(self, rank: int, generation: int, log: Path) -> None:
        """Become the worker of *rank*: from a standby that has parked, steps can be expected."""
        self.log_before = (self.log, self.log_begin)
        self.standby, self.rank, self.log = None, rank, log
        self.managed, self.grouped, self.started = True, True, time.time()
        self.enter(generation)

    def view(self) -> dict[str, Any]:
        """Return how far this worker is, for the beat that goes to the flow."""
        output_age, printed = self._of_output()
        return {
            "step": self.step,
            "age": round(time.monotonic() - self.progress, 3),
            "section": self.section,
            "section_limit": self.section_limit,
            "managed": self.managed,
            "process": state_of(self.pid) if self.pid else "?",
            "wait": wait_of(self.pid) if self.pid else "",
            "output_age": output_age,
            "printed": printed,
            "pid": self.pid,
            "snapshot": self._of_snapshots(),
            "paces": self.paces.told(),
            "checks": list(self.checks),
        }

    def _of_snapshots(self) -> Message:
        """Return what is known of its snapshots, with the newest one's age in seconds by the clock of this node."""
        told = dict(self.snapshot)
        begun = told.pop("at", None)
        return told if begun is None else told | {"age": round(max(0.0, time.time() - begun), 3)}

    def _of_output(self) -> tuple[float | None, bool]:
        """Return the seconds since it printed anything, or since its start, and whether it has printed anything."""
        try:
            log = self.log.stat()
        except OSError:
            return None, True
        return round(max(0.0, time.time() - max(log.st_mtime, self.started)), 3), log.st_size > self.log_begin

    def open_log(self, job: str) -> None:
        """Say in the log where this worker's output begins, of which job; raise ``OSError`` when there can be no log."""
        line = f"--- holdfast: {self.name} of job {job}\n".encode()
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.log_begin = os.fstat(log).st_size
            self.log_begin += os.write(log, line)
        except OSError:  # a full disk: the worker may still train, only its output is lost
            return
        finally:
            os.close(log)

    def tail(self) -> str:
        """Return the last lines of this worker's own output; bytes that are no text are replaced."""
        found = _tail(self.log, self.log_begin)
        return found or (_tail(*self.log_before) if self.log_before else "")


def _tail(log: Path, begin: int) -> str:
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begin, end - TAIL))
            return file.read(TAIL).decode(errors="replace").replace("\0", "\ufffd")
    except OSError:
        return ""
