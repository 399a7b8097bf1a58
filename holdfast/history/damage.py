"""Which row of a history holds what no version of Holdfast wrote: looked for once reading has failed, so that the message can name it.

SQLite keeps whatever it is given, also where a byte has flipped. PostgreSQL checks types itself, and that JSON is some.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, get_origin

from sqlalchemy import JSON, Boolean, Column, Connection, Engine, Float, Integer, Table, column, select, table, text
from sqlalchemy.exc import SQLAlchemyError

from holdfast.errors import RowCorrupt
from holdfast.history import models

MISREAD: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What becomes of a value that is not what its column holds."""
KINDS: Final[dict[type, str]] = {dict: "object", list: "list"}
SHOWN: Final = 60


def damage_of(engine: Engine, url: str) -> RowCorrupt | None:
    """Return the first row of the database at *url* that cannot be what was written; nothing where all can be."""
    with suppress(SQLAlchemyError), engine.connect() as connection:
        for one in sorted(models.TABLES, key=lambda one: one.name == "step"):  # the longest last
            for row, why in _damaged(connection, one):
                return RowCorrupt(url, one.name, row, why)
    return None


def _damaged(connection: Connection, of: Table) -> Iterator[tuple[str, str]]:
    """Yield rows of a table that cannot be read, by their primary key, and why."""
    keys = [one.name for one in of.primary_key]
    for one in of.columns:
        condition = _condition(one) if connection.dialect.name == "sqlite" else _of_json(one)
        plain = table(of.name, *(column(name) for name in dict.fromkeys([*keys, one.name])))  # values as they are stored
        wanted = select(*(plain.c[key] for key in keys), plain.c[one.name]).where(text(condition))
        for row in connection.execute(wanted) if condition else ():
            if why := _flaw(one, row[-1]):
                key = str(row[0]) if len(keys) == 1 else ", ".join(f"{name} {row[place]}" for place, name in enumerate(keys))
                yield key, f"its column '{one.name}' holds {str(row[-1])[:SHOWN]!r}, {why}"


def _condition(of: Column[Any]) -> str:
    """Return what speaks against a value of that column, in SQLite's words."""
    name = f'"{of.name}"'
    if isinstance(of.type, JSON):
        kind = "array" if _is_list(of) else "object"
        return f"{name} IS NOT NULL AND CASE WHEN json_valid({name}) THEN json_type({name}) <> '{kind}' ELSE 1 END"
    kinds = "'real', 'integer'" if _is_real(of) else "'integer'" if isinstance(of.type, (Integer, Boolean)) else "'text'"
    return f"typeof({name}) NOT IN ({kinds}, 'null')"


def _of_json(of: Column[Any]) -> str:
    """Return the same in PostgreSQL's words; empty where nothing can be wrong."""
    kind = "array" if _is_list(of) else "object"
    return f"json_typeof(\"{of.name}\") NOT IN ('{kind}', 'null')" if isinstance(of.type, JSON) else ""


def _flaw(of: Column[Any], value: object) -> str:
    """Say what is wrong with a suspicious value; empty where Python takes it, as it does NaN."""
    try:
        if isinstance(of.type, JSON):
            found = json.loads(value) if isinstance(value, str | bytes) else value
            wanted: type = list if _is_list(of) else dict
            return "" if isinstance(found, wanted) or (found is None and of.nullable) else f"which is no {KINDS[wanted]}"
        if isinstance(of.type, models.Real):
            float(str(value))
            return ""
    except (ValueError, RecursionError) as error:
        return f"which cannot be read ({error})"
    return f"which is no {'number' if _is_real(of) or isinstance(of.type, (Integer, Boolean)) else 'text'}"


def _is_real(of: Column[Any]) -> bool:
    return isinstance(of.type, (Float, models.Real))


def _is_list(of: Column[Any]) -> bool:
    """Tell whether rows have a list there: all other JSON is an object."""
    return get_origin(models.FIELDS[of.table.name, of.name]) is list
