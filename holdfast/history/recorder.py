"""Write the history without ever waiting for it: rows queue in memory, a thread writes them, an outage only makes the queue longer."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Final

from sqlmodel import SQLModel

from holdfast.history.changes import Change, added, amended, write
from holdfast.history.spill import absorb, set_aside, spill_out
from holdfast.history.store import History
from holdfast.log import note

__all__ = ["Recorder", "absorb"]

BATCH: Final = 500
"""Changes in one transaction at most."""

_LINGER: Final = 0.02
"""Seconds that the first change waits for company: a transaction costs more than a row."""

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
"""Seconds between attempts while the database is away."""

log = logging.getLogger(__name__)


class Recorder:
    """A queue before the history. Order is kept, nothing is dropped, and no caller waits or sees a database's error."""

    def __init__(self, history: History, spill: Path) -> None:
        self._history, self._spill = history, spill
        self._waiting: deque[Change] = deque()
        self._changed = threading.Condition()
        self._hurry = 0
        self._over = self._away = False
        self._thread = threading.Thread(target=self._work, name="history recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, row: SQLModel) -> None:
        """Write *row* soon, as it is now. A row whose key is there already is left as it is."""
        self._take_in(lambda: added(row))

    def amend(self, model: type[SQLModel], key: str | tuple[Any, ...], /, **fields: object) -> None:
        """Set *fields* soon in the row of *model* with that *key*."""
        self._take_in(lambda: amended(model, key, fields))

    def flush(self, seconds: float) -> bool:
        """Wait until all that was handed over is in the history; tell whether it is."""
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._waiting or self._over, seconds)
            self._hurry -= 1
            return done and not self._waiting

    def close(self, seconds: float = 2.0) -> bool:
        """Flush for *seconds*, spill the rest, and tell whether all is in the history. What comes later is spilled at once."""
        atexit.unregister(self.close)
        done = self.flush(seconds)
        with self._changed:
            self._over = True
            rest = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        self._spill_out(rest)
        self._thread.join(timeout=0 if rest else seconds)  # it may hang in the database: it is a daemon, and its rows are safe
        return done and not rest

    def _take_in(self, make: Callable[[], Change]) -> None:
        """Queue a change; log what is none: a bug of ours must not stop a recovery."""
        try:
            change = make()
        except Exception as error:  # noqa: BLE001 (the caller is steering a job: recording never raises)
            note(log, "history.unrecordable", level=logging.ERROR, error=repr(error))
            return
        with self._changed:
            if not self._over:
                self._waiting.append(change)
                self._changed.notify_all()
                return
        self._spill_out([change])

    def _spill_out(self, changes: list[Change]) -> None:
        """Write *changes* to the spill file, and to the log if that fails as well."""
        if not changes:
            return
        try:
            spill_out(self._spill, changes)
            note(log, "history.spilled", level=logging.WARNING, changes=len(changes), spill=self._spill)
        except Exception as error:  # noqa: BLE001 (the last place left is the log)
            note(log, "history.lost", level=logging.ERROR, error=error, changes=[change.as_record() for change in changes])

    def _work(self) -> None:
        """Write batch after batch until closed; after a failure wait a little longer each time."""
        wait = _FIRST_WAIT
        while batch := self._next_batch():
            if self._is_written(batch):
                wait = _FIRST_WAIT
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._over, wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _next_batch(self) -> list[Change]:
        """Wait for changes and return the oldest; nothing when closed. They stay in the queue until they are written."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over)
            self._changed.wait_for(lambda: self._hurry or self._over or len(self._waiting) >= BATCH, _LINGER)
            return list(islice(self._waiting, BATCH))

    def _is_written(self, batch: list[Change]) -> bool:
        """Write *batch* and take it from the queue; say once when the history goes away, and once when it is back."""
        try:
            write(self._history.engine, batch, lambda change, error: set_aside(self._spill, change, error))
        except Exception as error:  # noqa: BLE001 (whatever the database has, the rows must be written when it is back)
            if not self._away:
                note(log, "history.away", level=logging.WARNING, history=self._history.url, error=error)
            self._away = True
            return False
        if self._away:
            note(log, "history.back", history=self._history.url, waiting=len(self._waiting))
        self._away = False
        with self._changed:
            for _ in batch if not self._over else ():
                self._waiting.popleft()
            self._changed.notify_all()
        return True
