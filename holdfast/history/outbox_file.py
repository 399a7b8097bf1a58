"""The file for what could not be written to the history in time: one change a line.

Beside it, a file ``.refused`` keeps what no database takes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedRandom
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from holdfast.history.changes import RowChange, write
from holdfast.history.errors import translated
from holdfast.history.fence import Fence, FenceLost
from holdfast.history.store import History
from holdfast.log import note

log = logging.getLogger(__name__)


def as_records(changes: Sequence[RowChange], fence: Fence | None = None) -> list[dict[str, Any]]:
    """Return *changes* as JSON, each with the lease in whose name it was made."""
    by = {} if fence is None else {"by": fence.as_record()}
    return [change.as_record() | by for change in changes]


def append_to_outbox(outbox_path: Path, changes: Sequence[RowChange], fence: Fence | None = None) -> None:
    """Append *changes* to the file, and to the disk under it."""
    _append(outbox_path, as_records(changes, fence))


def forget(outbox_path: Path) -> None:
    """Remove the file: all that it holds has been written after all."""
    with _locked(outbox_path, create=False) as file:
        if file is not None:
            outbox_path.unlink()


def set_aside(outbox_path: Path, change: RowChange, error: Exception) -> None:
    """Keep a change that the database refuses for what it is, with the reason, and let those behind it pass."""
    reason = str(getattr(error, "orig", None) or error)
    note(log, "history.refused", level=logging.ERROR, table=change.table, reason=reason, kept=_refused(outbox_path))
    _append(_refused(outbox_path), [change.as_record() | {"reason": reason}])


def absorb(history: History, outbox_path: Path) -> int:
    """Write to *history* what a recorder left in *outbox_path*, remove the file, and return the number of changes.

    Safe at any time and any number of times: a crash in between means that the same rows are written again, which
    changes nothing. A last line that was torn by a crash, and any that is no change, goes to the file ``.refused``.
    """
    with _locked(outbox_path, create=False) as file:
        if file is None:
            return 0
        runs, unreadable = _read(file)
        if unreadable:
            note(log, "history.outbox-damaged", level=logging.WARNING, lines=len(unreadable), kept=_refused(outbox_path))
            _append(_refused(outbox_path), unreadable)
        with translated(history.url):
            for fence, changes in runs:
                _write(history, outbox_path, changes, fence)
        outbox_path.unlink()
    count = sum(len(changes) for _, changes in runs)
    note(log, "history.absorbed", changes=count, outbox_path=outbox_path)
    return count


def _write(history: History, outbox_path: Path, changes: list[RowChange], fence: Fence | None) -> None:
    """Write what one flow left; if another one has steered since, only what was seen: its acts are those of the job no more."""

    def aside(change: RowChange, error: Exception) -> None:
        set_aside(outbox_path, change, error)

    try:
        write(history.engine, changes, aside, fence)
    except FenceLost as error:
        write(history.engine, [change for change in changes if change.is_seen], aside)
        for change in changes:
            if not change.is_seen:
                set_aside(outbox_path, change, error)


def _refused(outbox_path: Path) -> Path:
    """Return where refused changes are kept."""
    return outbox_path.with_name(outbox_path.name + ".refused")


def _read(file: BufferedRandom) -> tuple[list[tuple[Fence | None, list[RowChange]]], list[dict[str, Any]]]:
    """Return the changes in *file*, those of one flow together, and records of the lines that are none."""
    found, unreadable = list[tuple[Fence | None, RowChange]](), []
    for line in file.read().splitlines():
        try:
            record = json.loads(line)
            found.append((fence_of(record), RowChange.from_record(record)))
        except (ValueError, RecursionError) as error:
            unreadable.append({"line": line.decode("utf-8", "backslashreplace"), "reason": str(error)})
    return [(fence, [change for _, change in run]) for fence, run in groupby(found, key=itemgetter(0))], unreadable


def fence_of(record: Any) -> Fence | None:  # noqa: ANN401 (whatever JSON a file holds)
    """Return the lease in whose name a change was made, if its record says so."""
    return Fence.from_record(record.get("by")) if isinstance(record, dict) else None


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append JSON lines to a file and wait until the disk has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, create=True) as file:
        assert file is not None
        if file.seek(0, os.SEEK_END) and _last_byte(file) != b"\n":
            file.write(b"\n")  # the line before was torn by a crash
        file.writelines(json.dumps(record).encode() + b"\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    with suppress(OSError):  # some file systems cannot sync a folder
        os.fsync(folder)
    os.close(folder)


def _last_byte(file: BufferedRandom) -> bytes:
    """Return the last byte of a file that is not empty, and stand behind it."""
    file.seek(-1, os.SEEK_END)
    return file.read(1)


@contextmanager
def _locked(path: Path, *, create: bool) -> Iterator[BufferedRandom | None]:
    """Open *path* alone among processes; nothing where there is none and none is to be made."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            yield None
            return
        with open(descriptor, "r+b") as file:  # noqa: PTH123 (a descriptor)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else it was absorbed while we waited
                yield file
                return
