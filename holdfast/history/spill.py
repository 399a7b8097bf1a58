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
from pathlib import Path
from typing import Any

from holdfast.history.changes import Change, write
from holdfast.history.store import History
from holdfast.history.trouble import translated
from holdfast.log import note

log = logging.getLogger(__name__)


def spill_out(spill: Path, changes: Sequence[Change]) -> None:
    """Append *changes* to the file, and to the disk under it."""
    _append(spill, [change.as_record() for change in changes])


def set_aside(spill: Path, change: Change, error: Exception) -> None:
    """Keep a change that the database refuses for what it is, with the reason, and let those behind it pass."""
    reason = str(getattr(error, "orig", None) or error)
    note(log, "history.refused", level=logging.ERROR, table=change.table, reason=reason, kept=_refused(spill))
    _append(_refused(spill), [change.as_record() | {"reason": reason}])


def absorb(history: History, spill: Path) -> int:
    """Write to *history* what a recorder left in *spill*, remove the file, and return the number of changes.

    Safe at any time and any number of times: a crash in between means that the same rows are written again, which
    changes nothing. A last line that was torn by a crash, and any that is no change, goes to the file ``.refused``.
    """
    with _locked(spill, create=False) as file:
        if file is None:
            return 0
        changes, unreadable = _read(file)
        if unreadable:
            note(log, "history.spill-damaged", level=logging.WARNING, lines=len(unreadable), kept=_refused(spill))
            _append(_refused(spill), unreadable)
        with translated(history.url):
            write(history.engine, changes, lambda change, error: set_aside(spill, change, error))
        spill.unlink()
    note(log, "history.absorbed", changes=len(changes), spill=spill)
    return len(changes)


def _refused(spill: Path) -> Path:
    """Return where refused changes are kept."""
    return spill.with_name(spill.name + ".refused")


def _read(file: BufferedRandom) -> tuple[list[Change], list[dict[str, Any]]]:
    """Return the changes in *file*, and records of the lines that are none."""
    changes, unreadable = [], []
    for line in file.read().splitlines():
        try:
            changes.append(Change.from_record(json.loads(line)))
        except (ValueError, RecursionError) as error:
            unreadable.append({"line": line.decode("utf-8", "backslashreplace"), "reason": str(error)})
    return changes, unreadable


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
