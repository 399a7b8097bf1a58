"""Read values of the command line (times, durations, ranks), and who runs it."""

from __future__ import annotations

import getpass
import platform
import time
from collections.abc import Container, Iterable, Sequence
from datetime import datetime, timedelta
from datetime import time as time_of_day
from pathlib import Path
from typing import Final

import click
from pydantic_core import PydanticCustomError

from holdfast.cluster import check_names
from holdfast.errors import UnknownOptionValue
from holdfast.spec import Cluster, LocalCluster, load_cluster
from holdfast.spec.files.units import parse_duration

MAX_RANKS: Final = 1_000_000
"""Ranks that one range may name; a larger number is a typing error."""


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


def cluster_in(file: Path | None) -> Cluster:
    """Return the cluster in *file*, or the cluster `local` on this machine where none is named."""
    return load_cluster(file) if file is not None else LocalCluster()


def named(cluster_file: Path | None) -> Path:
    """Return the cluster file; raise click's `UsageError` where none was named and there is no default."""
    if cluster_file is None:
        raise click.UsageError("name the cluster with `--cluster FILE`, or with the environment variable HOLDFAST_CLUSTER")
    return cluster_file


def known_nodes(given: Iterable[str], cluster: str, names: Sequence[str], also: Container[str] = ()) -> list[str]:
    """Return the nodes *given*, or all *names* of the cluster where none is; raise `UnknownNode` for others, but those in *also*."""
    found = list(given)
    check_names(found, cluster, names, also)
    return found or list(names)


def ranks_of(text: str) -> frozenset[int] | None:
    """Return the ranks that ``3``, ``0,2`` or ``0-3`` names; None where it names none."""
    found = set[int]()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 24:  # noqa: PLR2004 (two numbers of any job)
            return None
        begin, end = int(first), int(last or first)
        if not begin <= end < begin + MAX_RANKS:
            return None
        found.update(range(begin, end + 1))
    return frozenset(found)


def ranks_in(text: str, world: int | None) -> frozenset[int] | None:
    """Return the ranks, of *world* if that is known, that ``0,2-3``, ``all`` (None) or ``none`` names; else raise `UnknownOptionValue`."""
    given = text.strip().lower()
    if given in {"all", "none"}:
        return None if given == "all" else frozenset()
    found = ranks_of(given)
    if found is None or (world is not None and max(found) >= world):
        most = "" if world is None else f" to {world - 1}"
        raise UnknownOptionValue("log-ranks", text, (f"ranks from 0{most} such as `0,2-3`", "`all`", "`none`"))
    return found
