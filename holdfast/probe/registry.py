"""Objects that a flow opens, and that its tasks look up by cluster: Prefect's tasks take names only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

T = TypeVar("T")

_OPEN: dict[tuple[type, str], Any] = {}


@contextmanager
def register(cluster: str, value: T) -> Iterator[T]:
    """Let `registered` find *value* by its type and *cluster* while the block runs; yield it."""
    key = (type(value), cluster)
    _OPEN[key] = value
    try:
        yield value
    finally:
        _OPEN.pop(key, None)


def registered(kind: type[T], cluster: str) -> T:
    """Return the object of type *kind* that is registered for *cluster* in this process; raise ``KeyError`` without one."""
    return cast("T", _OPEN[kind, cluster])
