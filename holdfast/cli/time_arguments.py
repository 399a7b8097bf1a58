"""A time as people name it on the command line: a date and time, how long ago, or the next time that a clock shows it."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from datetime import time as time_of_day

from pydantic_core import PydanticCustomError

from holdfast.spec.durations import parse


def ago_or_at(text: str) -> float | None:
    """Return the seconds since 1970 that *text* names; nothing where it names no time.

    It is a duration (``7d``: so long ago), or a date with or without a time, in local time unless it says otherwise.
    """
    try:
        return max(0.0, time.time() - parse(text).total_seconds())
    except PydanticCustomError:
        pass
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def coming(text: str) -> float | None:
    """Return the seconds since 1970 of the time that *text* names: nothing where it names none.

    It is a date with a time, in local time unless it says otherwise, or a time of day (``18:00``): the next one.
    """
    now = datetime.now().astimezone()
    try:
        clock = time_of_day.fromisoformat(text.strip())
        today = datetime.combine(now.date(), clock)
        return (today if today.astimezone() > now else today + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError, OSError):
        pass
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
