"""How tests wait: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE = 0.01
"""Seconds between two looks."""


def wait_until(predicate: Callable[[], T], *, seconds: float, explain: str | Callable[[], str] = "") -> T:
    """Return the first true answer of *predicate*; fail after *seconds* with what *explain* says (a child's log, a state)."""
    deadline = time.monotonic() + seconds
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            told = explain() if callable(explain) else explain
            raise AssertionError(f"not so after {seconds:g} s, last answer {answer!r}. {told}")
        time.sleep(PAUSE)
    return answer
