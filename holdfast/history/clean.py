"""What a database cannot hold, made holdable: a worker's last words may be any bytes, and must not stop the history."""

from __future__ import annotations

import json
import math
from typing import Any


def clean_text(text: str) -> str:
    """Return *text* without NUL (PostgreSQL refuses it) and without lone surrogates (no database takes them)."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")


def clean(value: Any) -> Any:  # noqa: ANN401 (any JSON value, and what is not JSON as its text)
    """Return a copy of *value* that JSON in both databases can hold; NaN and infinities become words."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else _word(value)
        case str():
            return clean_text(value)
        case dict():
            return {clean_text(str(key)): clean(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [clean(item) for item in value]
        case _:
            return clean_text(str(value))


def clean_cell(value: Any) -> Any:  # noqa: ANN401 (whatever a column holds)
    """Return *value* as a column can hold it: a number stays a number, NaN included."""
    return value if isinstance(value, float) else clean(value)


def to_json(value: Any) -> str:  # noqa: ANN401 (SQLAlchemy's serializer takes anything)
    """Write *value* as strict JSON."""
    return json.dumps(clean(value), allow_nan=False)


def _word(value: float) -> str:
    """Return the name of a number that JSON does not know."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
