"""Changes to rows as values that can wait in memory or in a file and be applied twice, and the outbox file for those that had to wait.

The outbox file holds one change per line. Next to it, a file ``.refused`` keeps what no database accepts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, bindparam, update
from sqlmodel import SQLModel

from holdfast.history import models
from holdfast.history.engines import IMMEDIATE
from holdfast.history.errors import rejects_row, translated
from holdfast.history.lease import Fence, FenceLost
from holdfast.history.sanitize import clean_cell
from holdfast.history.store import History
from holdfast.log import note

log = logging.getLogger(__name__)

_TABLES: dict[str, Table] = {table.name: table for table in models.TABLES}

_OBSERVED = frozenset(str(model.__tablename__) for model in (models.StepRecord, models.Checkpoint, models.JobEvent, models.Snapshots))

SetAside = Callable[["RowChange", Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChange:
    """A row to add (no *key*), or values to set in the row with that *key*."""

    table: str
    values: dict[str, Any]
    key: dict[str, Any] | None = None

    @property
    def is_observation(self) -> bool:
        """Return whether it is an observation, which stays true whichever controller runs the job, and no action of a controller."""
        return self.key is None and self.table in _OBSERVED

    def as_record(self) -> dict[str, Any]:
        """Return the change as JSON."""
        return {"table": self.table, "key": self.key, "values": self.values}

    @classmethod
    def from_record(cls, record: Any) -> RowChange:  # noqa: ANN401 (any JSON from a file)
        """Return the change that *record* describes; raise `ValueError` for anything else."""
        match record:
            case {"table": str(table), "values": dict(values), "key": dict() | None as key} if table in _TABLES:
                if {*values, *(key or ())} <= {*_TABLES[table].columns.keys()}:
                    return cls(table=table, values=values, key=key)
        raise ValueError("it is no change to a table of the history")


def added(row: SQLModel) -> RowChange:
    """Return the change that adds *row* as it is now."""
    table = _TABLES[str(row.__tablename__)]
    return RowChange(table=table.name, values={name: clean_cell(getattr(row, name)) for name in table.columns.keys()})  # noqa: SIM118 (not a dict)


def amended(model: type[SQLModel], key: str | tuple[Any, ...], fields: dict[str, Any]) -> RowChange:
    """Return the change that sets *fields* in the row of *model* with that primary *key*."""
    table = _TABLES[str(model.__tablename__)]
    unknown = fields.keys() - {*table.columns.keys()}
    if unknown:
        raise ValueError(f"{table.name} has no {', '.join(sorted(unknown))}")
    parts = key if isinstance(key, tuple) else (key,)
    names = [column.name for column in table.primary_key]
    values = {name: clean_cell(value) for name, value in fields.items()}
    return RowChange(table=table.name, values=values, key=dict(zip(names, parts, strict=True)))


def write(engine: Engine, changes: Sequence[RowChange], set_aside: SetAside, fence: Fence | None = None) -> None:
    """Write *changes* in order, in one transaction if possible; pass to *set_aside* what the database rejects.

    Raise the database's own error if the database fails, and `FenceLost` if another controller has acquired the lease of *fence*. Writing
    the same changes again is harmless.
    """
    try:
        with (engine.execution_options(**{IMMEDIATE: True}) if fence else engine).begin() as connection:
            if fence is not None:
                fence.hold(connection)
            _apply(connection, changes)
    except Exception as error:
        if not rejects_row(error):
            raise
        if len(changes) == 1:
            set_aside(changes[0], error)
            return
        half = len(changes) // 2
        write(engine, changes[:half], set_aside, fence)
        write(engine, changes[half:], set_aside, fence)


def _apply(connection: Connection, changes: Sequence[RowChange]) -> None:
    """Write *changes* with as few statements as their order allows."""
    from sqlalchemy.dialects import postgresql, sqlite  # noqa: PLC0415 (only a writer pays for these)

    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    for (name, is_new, fields), group in groupby(changes, key=lambda change: (change.table, change.key is None, tuple(change.values))):
        table = _TABLES[name]
        if is_new:
            # an existing row stays: it was written before, but the success was not received
            connection.execute(insert(table).on_conflict_do_nothing(), [change.values for change in group])
        elif fields:
            statement = update(table).where(*(column == bindparam(f"key_{column.name}") for column in table.primary_key))
            statement = statement.values({field: bindparam(f"new_{field}") for field in fields})
            connection.execute(statement, [_parameters(change) for change in group])


def _parameters(change: RowChange) -> dict[str, Any]:
    """Return the parameters of an update."""
    new = {f"new_{name}": value for name, value in change.values.items()}
    return new | {f"key_{name}": value for name, value in (change.key or {}).items()}


# -- the outbox file ------------------------------------------------------------------------------------------------------


def as_records(changes: Sequence[RowChange], fence: Fence | None = None) -> list[dict[str, Any]]:
    """Return *changes* as JSON, each with the lease under which it was made."""
    by = {} if fence is None else {"by": fence.as_record()}
    return [change.as_record() | by for change in changes]


def append_to_outbox(outbox_path: Path, changes: Sequence[RowChange], fence: Fence | None = None) -> None:
    """Append *changes* to the file and sync it to the disk."""
    _append(outbox_path, as_records(changes, fence))


def remove_outbox(outbox_path: Path) -> None:
    """Remove the file: the history has everything in it."""
    with _locked(outbox_path, create=False) as file:
        if file is not None:
            outbox_path.unlink()


def set_aside(outbox_path: Path, change: RowChange, error: Exception) -> None:
    """Keep a change that the database rejects in the file ``.refused``, with the reason, so that later changes can be written."""
    reason = str(getattr(error, "orig", None) or error)
    refused = _refused(outbox_path)
    note(log, "history.refused", level=logging.ERROR, table=change.table, reason=reason, kept=refused)
    _append(refused, [change.as_record() | {"reason": reason}])


def absorb(history: History, outbox_path: Path) -> int:
    """Write to *history* what a recorder left in *outbox_path*, remove the file, and return the number of changes.

    It is safe to call at any time and again: after a crash in between the same rows are written a second time, which changes nothing. Lines
    that are no changes, such as the last line after a crash, go to the file ``.refused``.
    """
    with _locked(outbox_path, create=False) as file:
        if file is None:
            return 0
        groups, unreadable = _read(file)
        if unreadable:
            note(log, "history.outbox-damaged", level=logging.WARNING, lines=len(unreadable), kept=_refused(outbox_path))
            _append(_refused(outbox_path), unreadable)
        with translated(history.url):
            for fence, changes in groups:
                _write_group(history, outbox_path, changes, fence)
        outbox_path.unlink()
    count = sum(len(changes) for _, changes in groups)
    note(log, "history.absorbed", changes=count, outbox=outbox_path)
    return count


def _write_group(history: History, outbox_path: Path, changes: list[RowChange], fence: Fence | None) -> None:
    """Write what one controller left. If another one has acquired the job since, write only observations: the actions are void."""

    def aside(change: RowChange, error: Exception) -> None:
        set_aside(outbox_path, change, error)

    try:
        write(history.engine, changes, aside, fence)
    except FenceLost as error:
        write(history.engine, [change for change in changes if change.is_observation], aside)
        for change in changes:
            if not change.is_observation:
                set_aside(outbox_path, change, error)


def _refused(outbox_path: Path) -> Path:
    return outbox_path.with_name(outbox_path.name + ".refused")


def _read(file: BufferedRandom) -> tuple[list[tuple[Fence | None, list[RowChange]]], list[dict[str, Any]]]:
    """Return the changes in *file*, grouped by the lease under which they were made, and records of the lines that are no changes."""
    found, unreadable = list[tuple[Fence | None, RowChange]](), []
    for line in file.read().splitlines():
        try:
            record = json.loads(line)
            found.append((fence_of(record), RowChange.from_record(record)))
        except (ValueError, RecursionError) as error:
            unreadable.append({"line": line.decode("utf-8", "backslashreplace"), "reason": str(error)})
    return [(fence, [change for _, change in group]) for fence, group in groupby(found, key=itemgetter(0))], unreadable


def fence_of(record: Any) -> Fence | None:  # noqa: ANN401 (any JSON from a file)
    """Return the lease under which a change was made, if its record names one."""
    return Fence.from_record(record.get("by")) if isinstance(record, dict) else None


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append JSON lines to a file and sync it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, create=True) as file:
        assert file is not None
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # a crash left the line before incomplete
        file.writelines(json.dumps(record).encode() + b"\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    with suppress(OSError):  # some file systems cannot sync a folder
        os.fsync(folder)
    os.close(folder)


@contextmanager
def _locked(path: Path, *, create: bool) -> Iterator[BufferedRandom | None]:
    """Open *path* with an exclusive lock; give None if it does not exist and *create* is off."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            yield None
            return
        with open(descriptor, "r+b") as file:  # noqa: PTH123 (a descriptor)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else another process absorbed and removed it while we waited
                yield file
                return
