"""The newest epoch of each job whose controller has sent this node a command; kept in the node's folder, so that it outlives agents.

Commands that go past an agent (fence, start, wipe) may have been delayed in a partitioned network, or by a controller that was suspended,
while another controller took the job over. So each carries a fencing token, which is compared with this file before each thing it does.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.agent.errors import Refused, StaleEpoch
from holdfast.host.process import boot_time

FILE: Final = "epochs.json"
MAX_JOBS: Final = 256
"""Jobs that are kept, the newest: a command of an older one is later than any connection lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FencingToken:
    """What authorizes a command that no agent checks: the lease's epoch, and by when the command has to begin."""

    job: str
    """The job's id."""
    epoch: int
    until: float
    """Seconds since the boot of the machine on which this is read."""


class Epochs:
    """The file with the newest epochs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def of(self, job: str) -> int:
        """Return the newest epoch of *job* that was recorded here; 0 where there was none."""
        return self._read().get(job, 0)

    def record(self, job: str, epoch: int) -> None:
        """Record that a controller of that *epoch* has sent a command for *job*; raise ``OSError`` when it cannot be stored."""
        if self.of(job) >= epoch:
            return
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = self._read()
            if known.pop(job, 0) > epoch:  # another process was first
                return
            newest = dict([*known.items(), (job, epoch)][-MAX_JOBS:])
            new = self._path.with_suffix(".new")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump(newest, file)
            new.replace(self._path)
        finally:
            os.close(lock)

    def admit(self, token: FencingToken) -> None:
        """Accept a command that is in time and from the newest controller; raise `StaleEpoch` or `Refused` otherwise."""
        self.check(token)
        late = boot_time() - token.until
        if late > 0:
            raise Refused(f"it comes {late:.1f} s after the time for which its controller was sure of its lease")
        if self._path.parent.is_dir():
            with suppress(OSError):  # a full disk must not prevent the end of what runs here
                self.record(token.job, token.epoch)

    def check(self, token: FencingToken) -> None:
        """Raise `StaleEpoch` once a newer controller than that of *token* has sent a command here."""
        newest = self.of(token.job)
        if newest > token.epoch:
            raise StaleEpoch(newest, token.epoch)

    def _read(self) -> dict[str, int]:
        try:
            known = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return {job: epoch for job, epoch in known.items() if type(epoch) is int} if isinstance(known, dict) else {}
