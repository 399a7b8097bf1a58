"""Amounts of memory as people write them: ``8GB``, ``512MiB``, or a number of bytes."""

from __future__ import annotations

import re
from typing import Annotated, Final

from annotated_types import Gt
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

UNITS: Final = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
"""Bytes in each unit."""

CURE: Final = 'Write a number and a unit (KB, MB, GB, TB, KiB, MiB, GiB, TiB), e.g. "8GB" or "512MiB", or a number of bytes'
MOST: Final = 2**62

_TEXT: Final = re.compile(r"(\d{1,19})(\.\d{1,9})?\s*([kmgt]?i?b?)", re.ASCII | re.IGNORECASE)


def parse(value: object) -> int:
    """Return the bytes that *value* says; never negative."""
    size: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, float) and value.is_integer():
        size = int(value)
    elif isinstance(value, str) and (found := _TEXT.fullmatch(value.strip())):
        unit = UNITS.get(found[3].lower() or "b")
        size = None if unit is None else int(found[1]) * unit + int(float(found[2] or 0) * unit)
    if size is None or not 0 <= size <= MOST:
        raise PydanticCustomError("size", "{shown} is not an amount of memory", {"shown": repr(value)[:80], "cure": CURE})
    return size


def text_of(size: int) -> str:
    """Return *size* bytes as `parse` reads it, in the largest unit that gives a whole number."""
    unit = max((unit for unit, worth in UNITS.items() if size % worth == 0), key=UNITS.__getitem__) if size else "b"
    return f"{size // UNITS[unit]}{unit[0].upper()}{unit[1:-1]}{'B' if unit != 'b' else ''}"


Size = Annotated[
    int,
    BeforeValidator(parse),
    Gt(0),
    PlainSerializer(text_of, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["8GB", "512MiB"]}),
]
"""Bytes, at least one; a form shows them as text."""
