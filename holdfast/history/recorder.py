"""Write the history without ever waiting for it: rows queue in memory, a thread writes them, an outage only makes the queue longer.

While the database is away or slow another thread puts what waits on the disk, and leaves it with whoever else keeps it (`Outbox`), so
that the end of this process, of whatever kind, loses nothing either.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

from sqlmodel import SQLModel

from holdfast.history.changes import RowChange, added, amended, write
from holdfast.history.fence import Fence, FenceLost
from holdfast.history.outbox_file import absorb, append_to_outbox, as_records, forget, set_aside
from holdfast.history.store import History
from holdfast.log import note

__all__ = ["Recorder", "absorb"]

BATCH: Final = 500
"""Changes in one transaction at most."""

_LINGER: Final = 0.02
"""Seconds that the first change waits for company: a transaction costs more than a row."""

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
"""Seconds between attempts while the database is away."""

SLOW: Final = 0.25
"""Seconds that a change waits for the database before it is put on the disk too."""
_LOOK: Final = 0.1
"""Seconds between two looks at what waits."""
_DISK: Final = 5.0
"""Seconds that a disk may take to what is being put on it, when the recorder is closed."""

log = logging.getLogger(__name__)


class Outbox(Protocol):
    """Keeps what waits for the database in another place than this machine."""

    def keep(self, first: int, until: int, records: Callable[[int], list[dict[str, Any]]]) -> None:
        """Keep all that waits, numbered from *first* to *until* (exclusive); *records* gives it from a number on."""

    def forget(self, first: int) -> None:
        """Forget them: the database has all, up to the change of number *first* (exclusive)."""


class Recorder:
    """A queue before the history. Order is kept, nothing is dropped, and no caller waits or sees a database's error."""

    def __init__(self, history: History, outbox_path: Path, fence: Fence | None = None) -> None:
        """Write to *history* in the name of the lease *fence*, and put what cannot be written into *outbox_path*."""
        self._history, self._spill, self.fence = history, outbox_path, fence
        self._writing = threading.Lock()
        self.elsewhere: Outbox | None = None
        self._waiting: deque[tuple[float, RowChange]] = deque()
        self._first = self._stowed = 0
        """Number of the first change that waits, and of the first one that is not on the disk."""
        self._changed = threading.Condition()
        self._hurry = 0
        self._over = self._away = False
        self._kept = False
        """Something that waited is, or was to be, on the disk."""
        self._unsafe = ""
        """Why the disk does not take what waits."""
        self._disk = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="history recorder", daemon=True)
        self._thread.start()
        self._stower = threading.Thread(target=self._stow_what_waits, name="history spill", daemon=True)
        self._stower.start()
        atexit.register(self.close)

    def add(self, row: SQLModel) -> None:
        """Write *row* soon, as it is now. A row whose key is there already is left as it is."""
        self._take_in(lambda: added(row))

    def amend(self, model: type[SQLModel], key: str | tuple[Any, ...], /, **fields: object) -> None:
        """Set *fields* soon in the row of *model* with that *key*."""
        self._take_in(lambda: amended(model, key, fields))

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Write nothing while the block runs, which may change the lease in whose name is written."""
        with self._writing:
            yield

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
        stowing = self._disk.acquire(timeout=_DISK)
        with self._changed:
            self._over = True
            rest, left = self._from(self._stowed), bool(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        self._spill_out(rest)
        if stowing:
            self._disk.release()
        self._stower.join(timeout=seconds)
        if self._kept and not left:
            self._forget()
        self._kept = False
        self._thread.join(timeout=0 if left else seconds)  # it may hang in the database: it is a daemon, and its rows are safe
        return done and not left

    def _take_in(self, make: Callable[[], RowChange]) -> None:
        """Queue a change; log what is none: a bug of ours must not stop a recovery."""
        try:
            change = make()
        except Exception as error:  # noqa: BLE001 (the caller is control_job a job: recording never raises)
            note(log, "history.unrecordable", level=logging.ERROR, error=repr(error))
            return
        with self._changed:
            if not self._over:
                self._waiting.append((time.monotonic(), change))
                self._changed.notify_all()
                return
        self._spill_out([change])

    def _spill_out(self, changes: list[RowChange]) -> None:
        """Write *changes* to the spill file, and to the log if that fails as well."""
        if not changes:
            return
        try:
            append_to_outbox(self._spill, changes, self.fence)
            note(log, "history.outbox-written", level=logging.WARNING, changes=len(changes), outbox_path=self._spill)
        except Exception as error:  # noqa: BLE001 (the last place left is the log)
            note(log, "history.lost", level=logging.ERROR, error=error, changes=[change.as_record() for change in changes])

    # -- the database -------------------------------------------------------------------------------------------------

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

    def _next_batch(self) -> list[RowChange]:
        """Wait for changes and return the oldest; nothing when closed. They stay in the queue until they are written."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over)
            self._changed.wait_for(lambda: self._hurry or self._over or len(self._waiting) >= BATCH, _LINGER)
            return [change for _, change in islice(self._waiting, BATCH)]

    def _is_written(self, batch: list[RowChange]) -> bool:
        """Write *batch* and take it from the queue; say once when the history goes away, and once when it is back."""
        try:
            with self._writing:
                write(self._history.engine, batch, lambda change, error: set_aside(self._spill, change, error), self.fence)
        except FenceLost as error:
            self._refuse(batch, error)
        except Exception as error:  # noqa: BLE001 (whatever the database has, the rows must be written when it is back)
            if not self._away:
                note(log, "history.unreachable", level=logging.WARNING, history=self._history.url, error=error)
            self._away = True
            return False
        if self._away:
            note(log, "history.reachable", history=self._history.url, waiting=len(self._waiting))
        self._away = False
        with self._changed:
            for _ in batch if not self._over else ():
                self._waiting.popleft()
                self._first += 1
            self._changed.notify_all()
        return True

    def _refuse(self, batch: list[RowChange], why: Exception) -> None:
        """Keep aside what this flow may write no more."""
        try:
            for change in batch:
                set_aside(self._spill, change, why)
        except OSError as error:
            note(log, "history.lost", level=logging.ERROR, error=error, changes=[change.as_record() for change in batch])

    # -- while it is away ---------------------------------------------------------------------------------------------

    def _stow_what_waits(self) -> None:
        """Put on the disk what has waited for long; forget it once it is written."""
        pause = _LOOK
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._over, pause):
                    return
                written = self._kept and not self._waiting
            pause = _LOOK
            if self._is_late():
                with self._disk:
                    if self._over:
                        return
                    self._stow()
                pause = _LOOK if not self._unsafe else _LONGEST_WAIT
            elif written:
                with self._disk:
                    if not self._over:
                        self._forget()
            if self._kept:
                self._leave_elsewhere()

    def _is_late(self) -> bool:
        """Tell whether something waits that is not on the disk, and has for long, or the database is known to be away."""
        with self._changed:
            found = next(islice(self._waiting, max(0, self._stowed - self._first), None), None)
            return found is not None and not self._over and (self._away or time.monotonic() - found[0] > SLOW)

    def _stow(self) -> None:
        """Put on the disk what waits and is not there yet."""
        with self._changed:
            fresh = self._from(self._stowed)
            until = self._first + len(self._waiting)
        self._kept = True
        try:
            append_to_outbox(self._spill, fresh, self.fence)
        except Exception as error:  # noqa: BLE001 (a disk that is full or gone: the rows wait in memory, and that is told)
            if not self._unsafe:
                note(log, "history.outbox-failing", level=logging.ERROR, outbox_path=self._spill, error=error, cure="free space there")
            self._unsafe = str(error)
        else:
            self._stowed, self._unsafe = until, ""

    def _leave_elsewhere(self) -> None:
        """Have all that waits kept in another place as well."""
        if self.elsewhere is not None:
            with self._changed:
                first, until = self._first, self._first + len(self._waiting)
            self.elsewhere.keep(first, until, self._records)

    def _records(self, number: int) -> list[dict[str, Any]]:
        """Return what waits as JSON, from the change of that *number* on."""
        with self._changed:
            return as_records(self._from(number), self.fence)

    def _from(self, number: int) -> list[RowChange]:
        """Return what waits, from the change of that *number* on."""
        return [change for _, change in islice(self._waiting, max(0, number - self._first), None)]

    def _forget(self) -> None:
        """Forget the copies of what has been written."""
        try:
            forget(self._spill)
        except OSError as error:
            note(log, "history.outbox-not-removed", level=logging.WARNING, outbox_path=self._spill, error=error)
        if self.elsewhere is not None:
            with self._changed:
                first = self._first
            self.elsewhere.forget(first)
        self._kept, self._stowed = False, 0
