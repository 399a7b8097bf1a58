"""Make any value storable: the last output of a worker may be any bytes and must not block the history."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any, Final

_SUSPICIOUS: Final = ("\\u0000", "\\ud")
"""JSON text that encodes a NUL or, possibly, a lone surrogate."""


def clean_text(text: str) -> str:
    """Return *text* without NUL (PostgreSQL rejects it) and without lone surrogates (every database rejects them)."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")


def clean(value: Any) -> Any:  # noqa: ANN401 (any JSON value; anything else becomes its text)
    """Return a copy of *value* that both databases can store as JSON; NaN and infinities become text."""
    if isinstance(value, dict | list | tuple) and (text := _strict_json(value)) is not None:
        return json.loads(text)
    return _cleaned(value)


def clean_cell(value: Any) -> Any:  # noqa: ANN401 (whatever a column holds)
    """Return *value* as a column can store it: a float stays a float, also NaN."""
    return value if isinstance(value, float) else clean(value)


def to_json(value: Any) -> str:  # noqa: ANN401 (SQLAlchemy's serializer takes anything)
    """Return *value* as strict JSON."""
    return _strict_json(value) or json.dumps(_cleaned(value), allow_nan=False)


def _strict_json(value: Any) -> str | None:  # noqa: ANN401
    """Return *value* as JSON if nothing in it needs cleaning: this is fast, and rows of thousands of nodes are large."""
    with suppress(TypeError, ValueError):
        text = json.dumps(value, allow_nan=False)
        return None if any(part in text for part in _SUSPICIOUS) else text
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
