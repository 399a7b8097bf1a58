"""What the agent knows about one worker: its process, its progress, its output, and the error that it left."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from holdfast.host.process import state_of, wait_of
from holdfast.protocol import Message

if TYPE_CHECKING:
    from holdfast.agent.connection import ClientConnection

NO_RANK: Final = -1
"""The rank of a hot spare."""
GPU_VARIABLES: Final = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
"""Variables by which a rank chooses its GPU."""
MAX_DEFERRED: Final = 4096
"""Messages of one worker that wait until its generation is recorded; of more the oldest are dropped."""
MAX_CHECKSUMS: Final = 4
"""Checksums that a heartbeat carries: heartbeats may be lost, and nodes send them at different times."""
TAIL: Final = 8192
"""Bytes of a worker's output that are reported with its end."""
BLOCK: Final = 8
"""Steps of a block. Blocks begin at the same steps on all ranks, so that they can be compared."""
MIN_BLOCK_STEPS: Final = 5
"""Steps that a block must have to count; steps with a section in them are left out."""
MAX_BLOCKS: Final = 4
"""Newest blocks that a heartbeat carries: heartbeats may be lost."""
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path for the error that ``torch.distributed.elastic.multiprocessing.errors.record`` leaves, as torchrun reads it."""
MAX_ERROR_BYTES: Final = 1 << 20
MAX_TRACEBACK: Final = 16 * 1024
"""Characters of such an error's traceback that are reported: its end."""
_ERROR: Final = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)


class StepTimings:
    """How one worker's steps spent their time in one generation, as medians over blocks of steps: one slow step does not change them."""

    def __init__(self) -> None:
        self._block = -1
        self._steps: list[Sequence[float]] = []
        self._complete: deque[list[float]] = deque(maxlen=MAX_BLOCKS)

    def add(self, step: int, spent: Sequence[float]) -> None:
        """Add how *step* spent its time, in seconds: own work, waits for other ranks, waits for data."""
        block = (step - 1) // BLOCK
        if block != self._block:
            self._block, self._steps = block, []
        self._steps.append(spent)
        if step % BLOCK == 0 and len(self._steps) >= MIN_BLOCK_STEPS:
            self._complete.append([block, *(round(median(one), 6) for one in zip(*self._steps, strict=True))])

    def newest(self) -> list[list[float]]:
        """Return the newest blocks: number, and the medians of own work, waits for other ranks, and waits for data in seconds."""
        return list(self._complete)


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rank's process; it may stay that over several generations, or have been a hot spare before."""

    rank: int
    generation: int
    log: Path
    hot_spare: int | None = None
    """Its number as a hot spare, until it becomes the worker of a rank."""
    request_id: int = -1
    """The number under which the spawner started it."""
    log_begin: int = 0
    """Size of the log when this worker started: what comes after is its own."""
    log_before: tuple[Path, int] | None = None
    """The log it had as a hot spare, for as long as it has written nothing to the rank's."""
    error_file: Path | None = None
    """Where its script may leave the error that ends it."""
    pid: int | None = None
    started: float = 0.0
    managed: bool = False
    heartbeats: bool = False
    """It reports steps and keeps its own state: it may exit without reporting that it has finished."""
    step: int | None = None
    first_step: float | None = None
    progress: float = field(default_factory=time.monotonic)
    """When it last made progress (monotonic)."""
    snapshot: Message = field(default_factory=dict)
    """What it has reported of its in-memory snapshots in this generation."""
    step_timings: StepTimings = field(default_factory=StepTimings)
    checks: deque[Message] = field(default_factory=lambda: deque(maxlen=MAX_CHECKSUMS))
    """The newest checksums of its parameters in this generation."""
    bad_loss: bool = False
    """The last loss that it reported is NaN or infinite."""
    section: str | None = None
    section_limit: float | None = None
    raised: dict[str, Any] | None = None
    finished: bool = False
    exited: bool = False
    ordered: bool = False
    """Its end is wanted: it was killed by a command, or leaves."""
    leave_by: float | None = None
    """When it is killed if it has not exited by then (monotonic)."""
    grouped: bool = False
    """Its process groups are Holdfast's own: it can be kept when others are lost. A fresh rank joins living ones in no other way."""
    parked: Message | None = None
    """What it reported when it was ready as a hot spare."""
    gpu_variables: dict[str, str] = field(default_factory=dict)
    """Those of `GPU_VARIABLES` that are in its environment."""
    connection: ClientConnection | None = None
    """The connection on which it said hello, for messages to it."""
    greetings: list[Message] = field(default_factory=list)
    """Messages for it that wait for its hello."""
    former: int | None = None
    """The generation it was kept from, until it has resumed in the new one."""
    was_first: bool = False
    """It had the lowest rank of the job in the generation it was kept from, or where that came to nothing, in the one before."""
    ahead: int | None = None
    """The generation it has switched to by itself; its messages wait until that is recorded here."""
    deferred: deque[tuple[ClientConnection, Message]] = field(default_factory=lambda: deque(maxlen=MAX_DEFERRED))

    @property
    def name(self) -> str:
        """Return how logs call it."""
        return f"rank {self.rank}, generation {self.generation}" if self.hot_spare is None else f"hot spare {self.hot_spare}"

    @property
    def is_ahead(self) -> bool:
        """Return whether it is in a generation that is not recorded here yet."""
        return self.ahead is not None and self.ahead > self.generation

    def advance(self) -> None:
        """Note that it made progress."""
        self.progress = time.monotonic()

    def enter(self, generation: int) -> None:
        """Go on into a new generation, in which it has done no step yet."""
        self.generation, self.first_step = generation, None
        self.section, self.section_limit = None, None
        self.snapshot, self.step_timings, self.bad_loss = {}, StepTimings(), False
        self.checks.clear()
        self.advance()

    def activate(self, rank: int, generation: int, log: Path) -> None:
        """Turn a parked hot spare into the worker of *rank*, which will report steps."""
        self.log_before = (self.log, self.log_begin)
        self.hot_spare, self.rank, self.log = None, rank, log
        self.managed, self.grouped, self.started = True, True, time.time()
        self.enter(generation)

    def view(self) -> dict[str, Any]:
        """Return the progress of this worker, for a heartbeat to the controller. Ages are in seconds by this node's clock."""
        snapshot = dict(self.snapshot)
        begun = snapshot.pop("at", None)
        if begun is not None:
            snapshot["age"] = round(max(0.0, time.time() - begun), 3)
        output_age, printed = None, True
        try:
            log = self.log.stat()
            output_age, printed = round(max(0.0, time.time() - max(log.st_mtime, self.started)), 3), log.st_size > self.log_begin
        except OSError:
            pass
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
            "snapshot": snapshot,
            "step_timings": self.step_timings.newest(),
            "checks": list(self.checks),
        }

    def open_log(self, job: str) -> None:
        """Mark in the log where this worker's output begins, and of which job; raise ``OSError`` when there can be no log."""
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

    def make_error_file(self, folder: Path) -> Path:
        """Return where this worker is to leave its error, below the agent's own *folder*; what is there is removed."""
        self.error_file = folder / "errors" / f"{self.request_id}.json"
        self.error_file.parent.mkdir(mode=0o700, exist_ok=True)
        self.error_file.unlink(missing_ok=True)
        return self.error_file

    def take_error(self) -> dict[str, Any] | None:
        """Return the error that its script left for its launcher, in the form in which a worker reports one, and remove the file.

        None where there is none that can be read.
        """
        if self.error_file is None:
            return None
        try:
            with self.error_file.open("rb") as file:
                data = file.read(MAX_ERROR_BYTES + 1)
            self.error_file.unlink(missing_ok=True)
            error: Any = json.loads(data)["message"] if len(data) <= MAX_ERROR_BYTES else None
            text, traceback = (error, "") if isinstance(error, str) else (str(error["message"]), str(error["extraInfo"]["py_callstack"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        found = _ERROR.fullmatch(text)
        if found is None:
            return None
        message = (found["message"] or "")[:MAX_TRACEBACK]
        return {"type": found["type"], "message": message, "traceback": traceback[-MAX_TRACEBACK:], "step": None}


def _tail(log: Path, begin: int) -> str:
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begin, end - TAIL))
            return file.read(TAIL).decode(errors="replace").replace("\0", "\ufffd")
    except OSError:
        return ""
