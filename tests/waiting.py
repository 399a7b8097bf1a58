"""How tests wait: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE = 0.01
"""Seconds between two looks, at least."""

LONGEST = 0.2
"""And at most, however long a look takes."""

SHARE = 4
"""How many times as long as a look takes the next one waits: who waits leaves the processors to what is waited for."""


def wait_until(predicate: Callable[[], T], *, seconds: float, explain: str | Callable[[], str] = "") -> T:
    """Return the first true answer of *predicate*; fail after *seconds* with what *explain* says (a child's log, a state)."""
    begin = time.monotonic()
    deadline = begin + seconds
    while not (answer := predicate()):
        now = time.monotonic()
        if now > deadline:
            explanation = explain() if callable(explain) else explain
            raise AssertionError(f"not so after {seconds:g} s, last answer {answer!r}. {explanation}")
        time.sleep(min(max(PAUSE, SHARE * (now - begin)), LONGEST))
        begin = time.monotonic()
    return answer
