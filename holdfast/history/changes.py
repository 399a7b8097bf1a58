"""One row to write, or a few of its cells to set: as a value that can wait in memory or in a file, and be applied twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Engine, Table, bindparam, update
from sqlmodel import SQLModel

from holdfast.history import models
from holdfast.history.errors import refuses_the_row
from holdfast.history.fence import Fence
from holdfast.history.sanitize import clean_cell
from holdfast.history.sqlite_file import IMMEDIATE

_TABLES: dict[str, Table] = {table.name: table for table in models.TABLES}

_SEEN = frozenset(str(model.__tablename__) for model in (models.StepRecord, models.Checkpoint, models.JobEvent, models.Snapshots))

SetAside = Callable[["RowChange", Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChange:
    """A row to add (no *key*), or values to set in the row with that *key*."""

    table: str
    values: dict[str, Any]
    key: dict[str, Any] | None = None

    @property
    def is_seen(self) -> bool:
        """Tell whether it is what somebody saw, which stays true whoever steers, and no act of a flow."""
        return self.key is None and self.table in _SEEN

    @property
    def shape(self) -> tuple[str, bool, tuple[str, ...]]:
        """Return what neighbours must share to be written by one statement."""
        return self.table, self.key is None, tuple(self.values)

    def as_record(self) -> dict[str, Any]:
        """Return the change as JSON."""
        return {"table": self.table, "key": self.key, "values": self.values}

    @classmethod
    def from_record(cls, record: Any) -> RowChange:  # noqa: ANN401 (whatever JSON a file holds)
        """Return the change that *record* describes; raise `ValueError` for anything else."""
        match record:
            case {"table": str(table), "values": dict(values), "key": dict() | None as key} if table in _TABLES:
                if {*values, *(key or ())} <= {*_TABLES[table].columns.keys()}:
                    return cls(table=table, values=values, key=key)
        raise ValueError("it is no change to a table of the history")


def added(row: SQLModel) -> RowChange:
    """Return the adding of *row*, as it is now."""
    table = _TABLES[str(row.__tablename__)]
    return RowChange(table=table.name, values={name: clean_cell(getattr(row, name)) for name in table.columns.keys()})  # noqa: SIM118 (not a dict)


def amended(model: type[SQLModel], key: str | tuple[Any, ...], fields: dict[str, Any]) -> RowChange:
    """Return the setting of *fields* in the row of *model* with that primary *key*."""
    table = _TABLES[str(model.__tablename__)]
    unknown = fields.keys() - {*table.columns.keys()}
    if unknown:
        raise ValueError(f"{table.name} has no {', '.join(sorted(unknown))}")
    parts = key if isinstance(key, tuple) else (key,)
    names = [column.name for column in table.primary_key]
    values = {name: clean_cell(value) for name, value in fields.items()}
    return RowChange(table=table.name, values=values, key=dict(zip(names, parts, strict=True)))


def write(engine: Engine, changes: Sequence[RowChange], set_aside: SetAside, fence: Fence | None = None) -> None:
    """Write *changes* in order, in one transaction where possible; hand to *set_aside* what the database refuses for what it is.

    Raise what the database raises when it is the database that is unwell, and `Overtaken` when the lease that *fence* names has gone to
    another flow. Writing the same changes again is harmless.
    """
    try:
        with (engine.execution_options(**{IMMEDIATE: True}) if fence else engine).begin() as connection:
            if fence is not None:
                fence.hold(connection)
            _apply(connection, changes)
    except Exception as error:
        if not refuses_the_row(error):
            raise
        if len(changes) == 1:
            set_aside(changes[0], error)
            return
        half = len(changes) // 2
        write(engine, changes[:half], set_aside, fence)
        write(engine, changes[half:], set_aside, fence)


def _apply(connection: Connection, changes: Sequence[RowChange]) -> None:
    """Write *changes* by as few statements as their order allows."""
    for (name, is_new, fields), group in groupby(changes, key=lambda change: change.shape):
        table = _TABLES[name]
        if is_new:
            connection.execute(_insert(connection, table), [change.values for change in group])
        elif fields:
            statement = update(table).where(*(column == bindparam(f"key_{column.name}") for column in table.primary_key))
            statement = statement.values({field: bindparam(f"new_{field}") for field in fields})
            connection.execute(statement, [_parameters(change) for change in group])


def _insert(connection: Connection, table: Table) -> Any:  # noqa: ANN401 (each database has its own class for it)
    """Return an insert that leaves a row alone that is there already: it was written before its success was heard of."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415 (only who uses it pays for it)

        return postgresql.insert(table).on_conflict_do_nothing()
    from sqlalchemy.dialects import sqlite  # noqa: PLC0415

    return sqlite.insert(table).on_conflict_do_nothing()


def _parameters(change: RowChange) -> dict[str, Any]:
    """Return the values of an update's parameters."""
    new = {f"new_{name}": value for name, value in change.values.items()}
    return new | {f"key_{name}": value for name, value in (change.key or {}).items()}
