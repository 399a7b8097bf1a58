"""Read values of the command line (times, durations, ranks), and who runs it."""

from __future__ import annotations

import getpass
import platform
import time
from datetime import datetime, timedelta
from datetime import time as time_of_day

import click
from pydantic_core import PydanticCustomError

from holdfast.errors import UnknownOptionValue
from holdfast.spec.units import DURATION_CURE, parse_duration


def operator() -> str:
    """Return the user's name and the host, as the history records who requested something."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = "someone"
    return f"{user}@{platform.node()}"


def past_time(text: str) -> float | None:
    """Return the time that *text* names, in seconds since 1970, or None.

    It is a duration (``7d``: that long ago), or a date with or without a time, in local time unless it names a zone.
    """
    try:
        return max(0.0, time.time() - parse_duration(text).total_seconds())
    except PydanticCustomError:
        return _date(text)


def coming_time(text: str) -> float | None:
    """Return the time that *text* names, in seconds since 1970, or None.

    It is a date with a time, in local time unless it names a zone, or a time of day (``18:00``): the next one.
    """
    now = datetime.now().astimezone()
    try:
        today = datetime.combine(now.date(), time_of_day.fromisoformat(text.strip()))
        return (today if today.astimezone() > now else today + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError, OSError):
        return _date(text)


def _date(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def seconds_in(text: str, option: str) -> float:
    """Return the seconds of the duration *text*; raise click's `BadParameter` about *option* if it is none, or zero."""
    try:
        seconds = parse_duration(text).total_seconds()
    except PydanticCustomError:
        seconds = 0.0
    if seconds <= 0:
        raise click.BadParameter(f"'{text}' is not a duration above zero. {DURATION_CURE}.", param_hint=f"'{option}'")
    return seconds


def ranks_in(text: str, world: int) -> frozenset[int] | None:
    """Return the ranks that ``0,2-3``, ``all`` (None) or ``none`` names, of *world* ranks; raise `UnknownOptionValue` otherwise."""
    given = text.strip().lower()
    if given in {"all", "none"}:
        return None if given == "all" else frozenset()
    known, found = (f"ranks from 0 to {world - 1} such as `0,2-3`", "`all`", "`none`"), set[int]()
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 24:  # noqa: PLR2004 (two numbers of any job)
            raise UnknownOptionValue("log-ranks", text, known)
        begin, end = int(first), int(last or first)
        if not begin <= end < world:
            raise UnknownOptionValue("log-ranks", text, known)
        found.update(range(begin, end + 1))
    return frozenset(found)
