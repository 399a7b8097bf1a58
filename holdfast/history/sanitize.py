"""What a database cannot hold, made holdable: a worker's last words may be any bytes, and must not stop the history."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any, Final

_DOUBTFUL: Final = ("\\u0000", "\\ud")
"""What JSON's text has where there is a NUL or, perhaps, a lone surrogate."""


def clean_text(text: str) -> str:
    """Return *text* without NUL (PostgreSQL refuses it) and without lone surrogates (no database takes them)."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")


def clean(value: Any) -> Any:  # noqa: ANN401 (any JSON value, and what is not JSON as its text)
    """Return a copy of *value* that JSON in both databases can hold; NaN and infinities become words."""
    if isinstance(value, dict | list | tuple) and (text := _clean_json(value)) is not None:
        return json.loads(text)
    return _cleaned(value)


def _clean_json(value: Any) -> str | None:  # noqa: ANN401
    """Return *value* as JSON if nothing in it has to be cleaned: what thousands of nodes make is large, and this is quick."""
    with suppress(TypeError, ValueError):
        text = json.dumps(value, allow_nan=False)
        return None if any(doubtful in text for doubtful in _DOUBTFUL) else text
    return None


def _cleaned(value: Any) -> Any:  # noqa: ANN401
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else ("NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity")
        case str():
            return clean_text(value)
        case dict():
            return {clean_text(str(key)): _cleaned(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_cleaned(item) for item in value]
        case _:
            return clean_text(str(value))


def clean_cell(value: Any) -> Any:  # noqa: ANN401 (whatever a column holds)
    """Return *value* as a column can hold it: a number stays a number, NaN included."""
    return value if isinstance(value, float) else clean(value)


def to_json(value: Any) -> str:  # noqa: ANN401 (SQLAlchemy's serializer takes anything)
    """Write *value* as strict JSON."""
    return _clean_json(value) or json.dumps(_cleaned(value), allow_nan=False)
