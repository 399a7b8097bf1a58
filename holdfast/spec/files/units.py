"""Read and write durations (``90s``, ``1h30m``), sizes (``8GB``, ``512MiB``) and bandwidths (``400Gbit/s``) as users write them."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Annotated, Any, Final

from annotated_types import Gt
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

SECONDS: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
"""Seconds in each unit of time, largest first."""
BYTES: Final = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
"""Bytes in each unit of memory."""
DURATION_CURE: Final = 'Write a number and a unit (ms, s, m, h, d), e.g. "90s", "5m", "1h30m" or "2d"'
SIZE_CURE: Final = 'Write a number and a unit (KB, MB, GB, TB, KiB, MiB, GiB, TiB), e.g. "8GB" or "512MiB", or a number of bytes'
BANDWIDTH_CURE: Final = 'Write a number and a unit (MB/s, GB/s, TB/s, Mbit/s, Gbit/s, Tbit/s), e.g. "400Gbit/s" or "2TB/s"'
PERCENT_CURE: Final = 'Write a number from 0 to 100 with a percent sign, e.g. "25%"'
MAX_BYTES: Final = 2**62

DURATION_EXAMPLES: Final = ["90s", "5m", "1h30m", "2d"]
SIZE_EXAMPLES: Final = ["8GB", "512MiB"]
BANDWIDTH_EXAMPLES: Final = ["400Gbit/s", "2TB/s"]
BANDWIDTHS: Final = {
    "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9,
}  # fmt: skip
"""Bytes a second in each unit of bandwidth, without its `/s`."""

_PART: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(ms|[smhd])\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\d{1,15}(?:\.\d{1,15})?", re.ASCII)
_PERCENT: Final = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", re.ASCII)
_BANDWIDTH: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]b(?:it)?)/s", re.ASCII | re.IGNORECASE)
_SIZE: Final = re.compile(r"(\d{1,19})(\.\d{1,9})?\s*([kmgt]?i?b?)", re.ASCII | re.IGNORECASE)


def _seconds_in(text: str) -> float | None:
    """Return the seconds in *text*, or None when it is not a duration."""
    if _NUMBER.fullmatch(text) and float(text) == 0:
        return 0.0
    parts, end = [], 0
    while found := _PART.match(text, end):
        parts.append(float(found[1]) * SECONDS[found[2]])
        end = found.end()
    return sum(parts) if parts and end == len(text) else None


def parse_duration(value: object) -> timedelta:
    """Return *value* (text or a timedelta) as a duration; raise `PydanticCustomError` for anything else, and if it is negative.

    A bare number is refused, unless it is 0: sbatch means minutes by it, Kubernetes and torchrun mean seconds.
    """
    seconds: float | None = None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = _seconds_in(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == 0:
        seconds = 0.0
    if seconds is not None and math.isfinite(seconds) and seconds >= 0:
        try:
            return timedelta(seconds=seconds)
        except OverflowError:
            pass
    if not isinstance(value, bool) and _NUMBER.fullmatch(str(value).strip()):
        cure = f'Write "{str(value).strip()[:40]}s" if it is seconds. {DURATION_CURE}'
        context = {"shown": repr(value)[:80], "cure": cure}
        raise PydanticCustomError("duration", "{shown} has no unit", context)
    raise PydanticCustomError("duration", "{shown} is not a duration", {"shown": repr(value)[:80], "cure": DURATION_CURE})


def format_duration(duration: timedelta) -> str:
    """Return *duration* as `parse_duration` reads it, in the largest unit that gives an integer."""
    whole, rest = divmod(duration, timedelta(seconds=1))
    if rest:
        return f"{duration.total_seconds():.6f}".rstrip("0") + "s"
    unit = next((unit for unit, size in SECONDS.items() if size >= 1 and whole % int(size) == 0), "s") if whole else "s"
    return f"{whole // int(SECONDS[unit])}{unit}"


def parse_size(value: object) -> int:
    """Return *value* (text or a number) in bytes; raise `PydanticCustomError` if it is not an amount of memory."""
    size: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, float) and value.is_integer():
        size = int(value)
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        unit = BYTES.get(found[3].lower() or "b")
        size = None if unit is None else int(found[1]) * unit + int(float(found[2] or 0) * unit)
    if size is None or not 0 <= size <= MAX_BYTES:
        raise PydanticCustomError("size", "{shown} is not an amount of memory", {"shown": repr(value)[:80], "cure": SIZE_CURE})
    return size


def format_size(size: int) -> str:
    """Return *size* bytes as `parse_size` reads it, in the largest unit that gives an integer."""
    unit = max((unit for unit, factor in BYTES.items() if size % factor == 0), key=BYTES.__getitem__) if size else "b"
    return f"{size // BYTES[unit]}{unit[0].upper()}{unit[1:-1]}{'B' if unit != 'b' else ''}"


def parse_bandwidth(value: object) -> float:
    """Return *value* (``400Gbit/s``, ``2TB/s``) in bytes a second; raise `PydanticCustomError` for anything else, and for nothing.

    A unit is needed: links are sold in bits, storage in bytes.
    """
    found = _BANDWIDTH.fullmatch(value.strip()) if isinstance(value, str) else None
    bandwidth = float(found[1]) * BANDWIDTHS[found[2].lower()] if found else 0.0
    if bandwidth > 0:
        return bandwidth
    fault = "has no unit" if not isinstance(value, bool) and _NUMBER.fullmatch(str(value).strip()) else "is not a bandwidth"
    raise PydanticCustomError("bandwidth", "{shown} {fault}", {"shown": repr(value)[:80], "fault": fault, "cure": BANDWIDTH_CURE})


def format_bandwidth(bandwidth: float) -> str:
    """Return *bandwidth* (bytes a second) as `parse_bandwidth` reads it."""
    unit = max((unit for unit in ("kb", "mb", "gb", "tb") if BANDWIDTHS[unit] <= bandwidth), key=BANDWIDTHS.__getitem__, default="kb")
    return f"{bandwidth / BANDWIDTHS[unit]:.6f}".rstrip("0").rstrip(".") + f"{unit.upper()}/s"


def parse_percent(value: object) -> float:
    """Return *value* (``25%``) as a share from 0 to 1; raise `PydanticCustomError` for anything else."""
    if isinstance(value, str) and (found := _PERCENT.fullmatch(value.strip())) and 0 <= float(found[1]) <= 100:  # noqa: PLR2004
        return float(found[1]) / 100
    raise PydanticCustomError("percent", "{shown} is not a percentage", {"shown": repr(value)[:80], "cure": PERCENT_CURE})


def format_percent(share: float) -> str:
    """Return *share* (0 to 1) as `parse_percent` reads it."""
    return f"{100 * share:.6f}".rstrip("0").rstrip(".") + "%"


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": DURATION_EXAMPLES}),
]
"""A duration, zero allowed; forms show it as text."""
PositiveDuration = Annotated[Duration, Gt(timedelta(0))]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Gt(0),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": SIZE_EXAMPLES}),
]
"""Bytes, at least one; forms show them as text."""
SizeOrZero = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": SIZE_EXAMPLES}),
]
Bandwidth = Annotated[
    float,
    BeforeValidator(parse_bandwidth),
    PlainSerializer(format_bandwidth, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": BANDWIDTH_EXAMPLES}),
]
"""Bytes a second, more than zero; forms show them as text."""
Percent = Annotated[
    float,
    BeforeValidator(parse_percent),
    PlainSerializer(format_percent, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9]{1,3}(\.[0-9]+)?\s*%$", "examples": ["25%"]}),
]
"""A share from 0 to 1, written in percent."""


def percent_bounds(*, most: float = 1.0) -> AfterValidator:
    """Return what refuses a share of nothing, and one above *most*; the message is in percent, as the file is."""

    def check(share: float) -> float:
        if 0 < share <= most:
            return share
        cure = f"Write more than 0% and at most {format_percent(most)}"
        raise PydanticCustomError("percent", "{shown} is out of range", {"shown": repr(format_percent(share)), "cure": cure})

    return AfterValidator(check)


def duration_field(default: str, *, description: str) -> Any:  # noqa: ANN401 (as pydantic's own Field)
    """Return a field with a *default* duration, which forms show as it is written here."""
    return Field(default=parse_duration(default), description=description, json_schema_extra={"default": default})


def size_field(default: str, *, description: str) -> Any:  # noqa: ANN401 (as pydantic's own Field)
    """Return a field with a *default* size, which forms show as it is written here."""
    return Field(default=parse_size(default), description=description, json_schema_extra={"default": default})
