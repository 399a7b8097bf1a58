"""Declared long sections: a compile, a save or an evaluation is not a hang while it keeps to its own limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from holdfast.runtime.agent_client import link

_begun = 0


def begun() -> int:
    """Return how many sections this process has begun so far: who measures steps leaves out those with one in them."""
    return _begun


@contextmanager
def section(name: str, limit: float | timedelta | None = None) -> Iterator[None]:
    """Declare that the block takes long: up to *limit* (seconds), or the job's own limit for sections.

    Without it a rank that commits no step for several times the usual step time is taken for hung.
    """
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    if seconds is not None and not seconds > 0:
        raise ValueError(f"section '{name}': the limit is {limit!r}, but must be a number of seconds above 0")
    global _begun  # noqa: PLW0603 (a count of the whole process)
    _begun += 1
    link().section(name, seconds, begin=True)
    try:
        yield
    finally:
        link().section(name, seconds, begin=False)
