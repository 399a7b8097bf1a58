"""Durations as people write them: ``90s``, ``5m``, ``1h30m``, ``2d``, or a number of seconds."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Annotated, Any, Final

from annotated_types import Gt
from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

UNITS: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
"""Seconds in each unit, largest first."""

CURE: Final = 'Write a number and a unit (ms, s, m, h, d), e.g. "90s", "5m" or "1h30m", or a number of seconds'

_PART: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(ms|[smhd])\s*", re.ASCII)
_ISO: Final = re.compile(r"P(?:(\d{1,15})D)?(?:T(?:(\d{1,15})H)?(?:(\d{1,15})M)?(?:(\d{1,15}(?:\.\d{1,15})?)S)?)?", re.ASCII)
_PLAIN: Final = re.compile(r"\d{1,15}(?:\.\d{1,15})?", re.ASCII)


def _refused(value: object) -> PydanticCustomError:
    return PydanticCustomError("duration", "{shown} is not a duration", {"shown": repr(value)[:80], "cure": CURE})


def _seconds_in(text: str) -> float | None:
    """Return the seconds that *text* says, or None when it says no duration."""
    if _PLAIN.fullmatch(text):
        return float(text)
    if (iso := _ISO.fullmatch(text)) and any(iso.groups()):  # what other programs make of a timedelta
        return sum(float(part or 0) * size for part, size in zip(iso.groups(), UNITS.values(), strict=False))
    parts, end = [], 0
    while found := _PART.match(text, end):
        parts.append(float(found[1]) * UNITS[found[2]])
        end = found.end()
    return sum(parts) if parts and end == len(text) else None


def parse(value: object) -> timedelta:
    """Return the duration that *value* says; never negative, never infinite."""
    if isinstance(value, timedelta):
        seconds: float | None = value.total_seconds()
    elif isinstance(value, str):
        seconds = _seconds_in(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if -1e15 < value < 1e15 else None  # noqa: PLR2004 (beyond what timedelta holds anyway)
    else:
        seconds = None
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        raise _refused(value)
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise _refused(value) from None


def text_of(duration: timedelta) -> str:
    """Return *duration* as `parse` reads it, in the largest unit that gives a whole number."""
    whole, rest = divmod(duration, timedelta(seconds=1))
    if rest:
        return f"{duration.total_seconds():.6f}".rstrip("0") + "s"
    unit = next((unit for unit, size in UNITS.items() if size >= 1 and whole % int(size) == 0), "s") if whole else "s"
    return f"{whole // int(UNITS[unit])}{unit}"


Duration = Annotated[
    timedelta,
    BeforeValidator(parse),
    PlainSerializer(text_of, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["90s", "5m", "1h30m", "2d"]}),
]
"""A duration, zero allowed; a form shows it as text."""

PositiveDuration = Annotated[Duration, Gt(timedelta(0))]


def lasting(default: str, *, description: str) -> Any:  # noqa: ANN401 (as pydantic's own Field)
    """Return a field of *default* length, which forms show as it is written here."""
    return Field(default=parse(default), description=description, json_schema_extra={"default": default})
