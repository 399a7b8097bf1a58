"""The newest epoch of each job that this node has had an order of, kept in the node's folder: it outlives agents, and late orders.

An order that goes past an agent (fence, start, wipe) may have lain in a network that was cut, or in a flow that stood still, while another
flow took the job over. So it carries a fencing token, and what serves it here compares that with the file before each thing that it does.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.agent.errors import Refused, StaleEpoch
from holdfast.process import boot_time

FILE: Final = "epochs.json"
MOST: Final = 256
"""Jobs that are remembered, the newest: an order of one before those is late by more than any connection lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FencingToken:
    """In whose name an order is given that no agent could refuse: the lease's epoch, and by when the order has to be begun."""

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
        """Return the newest epoch of *job* that was seen here; 0 where there was none."""
        return self._read().get(job, 0)

    def note(self, job: str, epoch: int) -> None:
        """Remember that a flow of that *epoch* has given an order for *job*; raise ``OSError`` when it cannot be kept."""
        if self.of(job) >= epoch:
            return
        with self._alone():
            known = self._read()
            if known.pop(job, 0) > epoch:  # another process was first
                return
            newest = dict([*known.items(), (job, epoch)][-MOST:])
            beside = self._path.with_suffix(".new")
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump(newest, file)
            beside.replace(self._path)

    def admit(self, token: FencingToken) -> None:
        """Let an order in that comes in time and of no older flow than the newest one; raise `StaleEpoch` or `Refused` otherwise."""
        self.check(token)
        late = boot_time() - token.until
        if late > 0:
            raise Refused(f"it comes {late:.1f} s after the time for which its flow was sure of its lease")
        if self._path.parent.is_dir():
            with suppress(OSError):  # a full disk must keep nobody from ending what runs here
                self.note(token.job, token.epoch)

    def check(self, token: FencingToken) -> None:
        """Raise `StaleEpoch` once a newer flow than that of *token* has given an order here."""
        newest = self.of(token.job)
        if newest > token.epoch:
            raise StaleEpoch(newest, token.epoch)

    def _read(self) -> dict[str, int]:
        try:
            known = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return {job: epoch for job, epoch in known.items() if type(epoch) is int} if isinstance(known, dict) else {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process at a time change the file."""
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
