"""Write the history without waiting for it: rows queue in memory and a thread writes them.

While the database is unreachable or slow, another thread writes the queue to the outbox file, and to a `RemoteOutbox` if there is one, so
that the death of this process loses nothing.
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

from holdfast.history.changes import RowChange, absorb, added, amended, append_to_outbox, as_records, remove_outbox, set_aside, write
from holdfast.history.lease import Fence, FenceLost
from holdfast.history.store import History
from holdfast.log import note

__all__ = ["Recorder", "absorb"]

BATCH: Final = 500
"""Changes in one transaction at most."""

_LINGER: Final = 0.02
"""Seconds that the first change waits for more: a transaction costs more than a row."""

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
"""Seconds between attempts while the database is unreachable."""

SLOW: Final = 0.25
"""Seconds that a change waits for the database before it also goes to the outbox file."""
_CHECK_INTERVAL: Final = 0.1
"""Seconds between two checks of the queue."""
_DISK_TIMEOUT: Final = 5.0
"""Seconds that closing waits for a write to the outbox file that is under way."""

log = logging.getLogger(__name__)


class RemoteOutbox(Protocol):
    """Keeps queued changes on other machines."""

    def keep(self, first: int, until: int, records: Callable[[int], list[dict[str, Any]]]) -> None:
        """Keep all queued changes, numbered from *first* to *until* (exclusive); *records* returns them from a number on."""

    def forget(self, first: int) -> None:
        """Drop all changes before number *first*: the database has them."""


class Recorder:
    """A queue in front of the history. It keeps the order and drops nothing; callers never wait and never see a database error."""

    def __init__(self, history: History, outbox_path: Path, fence: Fence | None = None) -> None:
        """Write to *history* under the lease *fence*; put what cannot be written into *outbox_path*."""
        self._history, self._outbox_path, self.fence = history, outbox_path, fence
        self._writing = threading.Lock()
        self.remote_outbox: RemoteOutbox | None = None
        self._queue: deque[tuple[float, RowChange]] = deque()
        self._first = self._saved = 0
        """Number of the first queued change, and of the first one that is not in the outbox file."""
        self._changed = threading.Condition()
        self._flushes = 0
        self._closed = self._unreachable = False
        self._has_copies = False
        """Some queued changes are, or were about to be, in an outbox."""
        self._disk_error = ""
        """Why the outbox file cannot be written."""
        self._disk = threading.Lock()
        self._writer = threading.Thread(target=self._write_queue, name="history recorder", daemon=True)
        self._writer.start()
        self._saver = threading.Thread(target=self._save_queue, name="history outbox", daemon=True)
        self._saver.start()
        atexit.register(self.close)

    def add(self, row: SQLModel) -> None:
        """Queue *row* as it is now. A row whose key exists already stays unchanged."""
        self._enqueue(lambda: added(row))

    def amend(self, model: type[SQLModel], key: str | tuple[Any, ...], /, **fields: object) -> None:
        """Queue a change of *fields* in the row of *model* with that *key*."""
        self._enqueue(lambda: amended(model, key, fields))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Write nothing while the block runs, so that it can change the lease under which this recorder writes."""
        with self._writing:
            yield

    def flush(self, seconds: float) -> bool:
        """Wait up to *seconds* until the history has all queued changes; return whether it has."""
        with self._changed:
            self._flushes += 1
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queue or self._closed, seconds)
            self._flushes -= 1
            return done and not self._queue

    def close(self, seconds: float = 2.0) -> bool:
        """Flush for *seconds*, write the rest to the outbox file, and return whether the history has everything.

        Later changes go to the outbox file at once.
        """
        atexit.unregister(self.close)
        done = self.flush(seconds)
        has_disk = self._disk.acquire(timeout=_DISK_TIMEOUT)
        with self._changed:
            self._closed = True
            rest, remaining = self._from(self._saved), bool(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        self._save(rest)
        if has_disk:
            self._disk.release()
        self._saver.join(timeout=seconds)
        if self._has_copies and not remaining:
            self._remove_copies()
        self._has_copies = False
        self._writer.join(timeout=0 if remaining else seconds)  # it may hang in the database: it is a daemon, and its rows are saved
        return done and not remaining

    def _enqueue(self, make: Callable[[], RowChange]) -> None:
        """Queue a change; log one that is invalid: a bug of ours must not stop a recovery."""
        try:
            change = make()
        except Exception as error:  # noqa: BLE001 (the caller runs a job: recording never raises)
            note(log, "history.unrecordable", level=logging.ERROR, error=repr(error))
            return
        with self._changed:
            if not self._closed:
                self._queue.append((time.monotonic(), change))
                self._changed.notify_all()
                return
        self._save([change])

    def _save(self, changes: list[RowChange]) -> None:
        """Write *changes* to the outbox file, or to the log if that fails too."""
        if not changes:
            return
        try:
            append_to_outbox(self._outbox_path, changes, self.fence)
            note(log, "history.outbox-written", level=logging.WARNING, changes=len(changes), outbox=self._outbox_path)
        except Exception as error:  # noqa: BLE001 (the log is the last resort)
            note(log, "history.lost", level=logging.ERROR, error=error, changes=[change.as_record() for change in changes])

    # -- writing to the database --------------------------------------------------------------------------------------

    def _write_queue(self) -> None:
        """Write one batch after another until closed; after each failure wait longer."""
        wait = _FIRST_WAIT
        while batch := self._next_batch():
            if self._is_written(batch):
                wait = _FIRST_WAIT
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._closed, wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _next_batch(self) -> list[RowChange]:
        """Wait for changes and return the oldest, nothing once closed. They stay queued until they are written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._changed.wait_for(lambda: self._flushes or self._closed or len(self._queue) >= BATCH, _LINGER)
            return [change for _, change in islice(self._queue, BATCH)]

    def _is_written(self, batch: list[RowChange]) -> bool:
        """Write *batch* and remove it from the queue; log once when the history becomes unreachable and once when it is reachable."""
        try:
            with self._writing:
                write(self._history.engine, batch, lambda change, error: set_aside(self._outbox_path, change, error), self.fence)
        except FenceLost as error:
            self._set_aside(batch, error)
        except Exception as error:  # noqa: BLE001 (whatever is wrong with the database, the rows must be written later)
            if not self._unreachable:
                note(log, "history.unreachable", level=logging.WARNING, history=self._history.url, error=error)
            self._unreachable = True
            return False
        if self._unreachable:
            note(log, "history.reachable", history=self._history.url, waiting=len(self._queue))
        self._unreachable = False
        with self._changed:
            for _ in batch if not self._closed else ():
                self._queue.popleft()
                self._first += 1
            self._changed.notify_all()
        return True

    def _set_aside(self, batch: list[RowChange], error: Exception) -> None:
        """Keep changes that this controller may no longer write in the file ``.refused``."""
        try:
            for change in batch:
                set_aside(self._outbox_path, change, error)
        except OSError as failed:
            note(log, "history.lost", level=logging.ERROR, error=failed, changes=[change.as_record() for change in batch])

    # -- saving the queue while the database is unreachable -----------------------------------------------------------

    def _save_queue(self) -> None:
        """Save changes that have waited for long; remove the copies once the database has them."""
        pause = _CHECK_INTERVAL
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause):
                    return
                is_written = self._has_copies and not self._queue
            pause = _CHECK_INTERVAL
            if self._is_late():
                with self._disk:
                    if self._closed:
                        return
                    self._save_new()
                pause = _CHECK_INTERVAL if not self._disk_error else _LONGEST_WAIT
            elif is_written:
                with self._disk:
                    if not self._closed:
                        self._remove_copies()
            if self._has_copies and self.remote_outbox is not None:
                with self._changed:
                    first, until = self._first, self._first + len(self._queue)
                self.remote_outbox.keep(first, until, self._records)

    def _is_late(self) -> bool:
        """Return whether a change that is not in the outbox file has waited for long, or the database is known to be unreachable."""
        with self._changed:
            found = next(islice(self._queue, max(0, self._saved - self._first), None), None)
            return found is not None and not self._closed and (self._unreachable or time.monotonic() - found[0] > SLOW)

    def _save_new(self) -> None:
        """Append the queued changes that are not in the outbox file yet."""
        with self._changed:
            fresh = self._from(self._saved)
            until = self._first + len(self._queue)
        self._has_copies = True
        try:
            append_to_outbox(self._outbox_path, fresh, self.fence)
        except Exception as error:  # noqa: BLE001 (a full or missing disk: the rows stay in memory, and the log says so)
            if not self._disk_error:
                note(log, "history.outbox-failing", level=logging.ERROR, outbox=self._outbox_path, error=error, cure="free space there")
            self._disk_error = str(error)
        else:
            self._saved, self._disk_error = until, ""

    def _records(self, number: int) -> list[dict[str, Any]]:
        """Return the queued changes as JSON, from that *number* on."""
        with self._changed:
            return as_records(self._from(number), self.fence)

    def _from(self, number: int) -> list[RowChange]:
        """Return the queued changes from that *number* on."""
        return [change for _, change in islice(self._queue, max(0, number - self._first), None)]

    def _remove_copies(self) -> None:
        """Remove the copies of changes that are written."""
        try:
            remove_outbox(self._outbox_path)
        except OSError as error:
            note(log, "history.outbox-not-removed", level=logging.WARNING, outbox=self._outbox_path, error=error)
        if self.remote_outbox is not None:
            with self._changed:
                first = self._first
            self.remote_outbox.forget(first)
        self._has_copies, self._saved = False, 0
